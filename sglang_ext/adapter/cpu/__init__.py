"""SGLang without an accelerator: the platform, and what it runs in place of CUDA operations."""
