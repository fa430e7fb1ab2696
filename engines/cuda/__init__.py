"""The CRIU+CUDA engine: GPU memory first into host memory, then CRIU."""
