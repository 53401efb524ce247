"""Programs that load a part of the machine, check what comes of it, and print what they found as
the `result` of a JSON object on a line of stdout. Each runs in a process of its own
(`elastic/doctor/bounded.py`): a GPU, a mount or a peer that does not answer is ended with it.

    burn         matrix products with a known result
    copies       memory, and between host and device
    all_reduce   one rank of a group, in a node or over two
    disk         a file is written, flushed and read back
    store        rights and speed where checkpoints lie
"""
