"""The command `elastic`.

    main         the parser's root, and errors as exit statuses
    checkpoints  `elastic checkpoints …`: what each subcommand takes
    actions      what each subcommand does
    live         `elastic attach` and `elastic stop`
    clear        `elastic clear`
    logs         `elastic logs`
    watch        `elastic watch`
    nodes        `elastic nodes …`
    dryrun       `elastic dryrun`
    prepare      `elastic prepare`
    program      the trainer in a user's program
    doctor       `elastic doctor`
    arguments    numbers on the command line
    runs         from what the user names to a store
    show         a checkpoint in words

Imports Ray only where a subcommand asks a cluster, torch only where one moves tensors.
"""
