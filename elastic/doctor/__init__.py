"""`elastic doctor`: what is wrong with this machine, and what to do about it.

    finding         what a check says, and the severities
    machine         what the checks look at
    gpu_checks      GPUs and their driver
    efa_checks      EFA's devices, libraries and environment
    system_checks   limits, memory, clock, disks
    clock           what the kernel says of its clock
    run             all of them, none for longer than its bound

A check is a function from a `Machine` to a `Finding`; to add one, write it and enter it in `run`.
Without Ray and torch.
"""
