"""The data plane: what runs in every worker. It imports no Ray and runs under a debugger as it
is."""
