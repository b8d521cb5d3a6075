// metal_simdgroup_matrix: 8 x 8 matrices, two neighbouring elements of a row in each lane.
//
// Apple does not document which lane holds what; this map is the one that MLX's steel kernels use
// with thread_elements. Products are summed in float in the order of k and rounded once.
#pragma once
#include "simd.h"

namespace metal {

template <class T, int ROWS = 8, int COLUMNS = 8>
struct simdgroup_matrix {
  static_assert(ROWS == 8 && COLUMNS == 8, "a simdgroup matrix is 8 x 8");
  static_assert(is_floating_point_v<T>, "a simdgroup matrix holds float, half or bfloat");
  vec<T, 2> elements;

  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T diagonal) {
    const uint r = row(), c = column();
    elements = vec<T, 2>{r == c ? diagonal : T(0), r == c + 1 ? diagonal : T(0)};
  }
  vec<T, 2>& thread_elements() { return elements; }

  static uint row() { return (msl_lane() / 4 & 4) + msl_lane() / 2 % 4; }
  static uint column() { return (msl_lane() / 4 & 2) * 2 + msl_lane() % 2 * 2; }
};
typedef simdgroup_matrix<float> simdgroup_float8x8;
typedef simdgroup_matrix<half> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat> simdgroup_bfloat8x8;

template <class T, int ROWS, int COLUMNS>
inline simdgroup_matrix<T, ROWS, COLUMNS> make_filled_simdgroup_matrix(T x) {
  simdgroup_matrix<T, ROWS, COLUMNS> filled;
  filled.elements = vec<T, 2>{x, x};
  return filled;
}

template <class T>
METAL_FUNC void simdgroup_load(simdgroup_matrix<T>& d, const T* source, ulong elements_per_row = 8,
                               ulong2 origin = ulong2{0, 0}, bool transpose = false) {
  const ulong r = transpose ? d.column() : d.row(), c = transpose ? d.row() : d.column();
  const T* first = source + (origin.y + r) * elements_per_row + origin.x + c;
  d.elements.x = first[0];
  d.elements.y = first[transpose ? elements_per_row : 1];
}

template <class T>
METAL_FUNC void simdgroup_store(simdgroup_matrix<T> a, T* target, ulong elements_per_row = 8,
                                ulong2 origin = ulong2{0, 0}, bool transpose = false) {
  const ulong r = transpose ? a.column() : a.row(), c = transpose ? a.row() : a.column();
  T* first = target + (origin.y + r) * elements_per_row + origin.x + c;
  first[0] = a.elements.x;
  first[transpose ? elements_per_row : 1] = a.elements.y;
}

template <class D, class A, class B, class C>
MSL_SITED void simdgroup_multiply_accumulate(simdgroup_matrix<D>& d, const simdgroup_matrix<A>& a,
                                             const simdgroup_matrix<B>& b,
                                             const simdgroup_matrix<C>& c) {
  msl_fragments operand{{(float)a.elements.x, (float)a.elements.y},
                        {(float)b.elements.x, (float)b.elements.y},
                        {(float)c.elements.x, (float)c.elements.y}};
  msl_simd(&operand, msl_multiply_accumulate, MSL_SITE);
  d.elements = vec<D, 2>{(D)operand.c[0], (D)operand.c[1]};
}

template <class D, class A, class B>
METAL_FUNC void simdgroup_multiply(simdgroup_matrix<D>& d, const simdgroup_matrix<A>& a,
                                   const simdgroup_matrix<B>& b) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<D, 8, 8>(D(0)));
}

}  // namespace metal
