"""How a replica gets its state: by a heal from another one, or by a restore that all share."""
