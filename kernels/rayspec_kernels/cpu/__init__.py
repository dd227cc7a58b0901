"""What the CPU platform runs in place of SGLang's CUDA operations, in plain torch; none has a Triton kernel."""
