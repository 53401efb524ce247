"""`elastic doctor`: what is wrong with this machine, and what to do about it.

    finding         what a check says, and the severities
    machine         what the checks look at
    gpu_checks      GPUs and their driver
    efa_checks      EFA's devices, libraries and environment
    system_checks   limits, memory, clock, disks, ports, the kernel's log
    clock           what the kernel says of its clock
    load_checks     matrix burn, memory, the group of a node
    storage_checks  where runs write
    bounded, loads  the programs that these start, each with a bound
    run             all of them, none for longer than its bound
    pairs           which machines of a cluster are tried together, and what follows (pure)

All machines of a Ray cluster: `elastic/driver/examine_cluster.py`.

A check is a function from a `Machine` to a `Finding`; to add one, write it and enter it in `run`.
Without Ray, and without torch but for the programs in `loads`.
"""
