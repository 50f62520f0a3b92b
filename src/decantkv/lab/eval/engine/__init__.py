"""One prefill a prompt, many evictions of it decoded together."""
