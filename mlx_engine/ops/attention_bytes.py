"""The bytes that the launches of the attention kernels must move, from shapes alone."""

from mlx_engine.ops.attention import cut_of


def sparse_attention_bytes(
    shape: tuple[int, int, int],
    rotated: int,
    *,
    window_rows: int,
    compressed_rows: int,
    most_rows: int,
    chosen: int,
    value_bytes: int,
    turns_q: bool = False,
) -> int:
    """Bytes that the kernels of one call read and write, for q of a shape (Q, H, D).

    Different rows that are seen at all, the most that one query may see, and the int32 in
    `visible` or `ids`, whichever is read.
    """
    Q, H, D = shape
    slices = cut_of(Q, H, most_rows).slices
    rows = window_rows * (D + D // 32) + compressed_rows * (D // 2 + D // 16) + 4 * chosen
    parts = 0 if slices == 1 else 2 * 4 * Q * slices * H * (D + 2)
    turning = 2 * 4 * Q * rotated * (2 if turns_q and slices > 1 else 1)
    return 2 * Q * H * D * value_bytes + rows + parts + 4 * H + turning
