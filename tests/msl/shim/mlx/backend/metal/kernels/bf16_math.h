// Replaces MLX's header of this name, which is written in compiler built-ins of Apple's: it gives
// metal:: functions for bfloat, and the stand-in for metal_stdlib has those already.
#pragma once
