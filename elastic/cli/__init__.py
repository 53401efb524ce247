"""The command `elastic`.

    main         the parser's root, and errors as exit statuses
    checkpoints  `elastic checkpoints …`: what each subcommand takes
    actions      what each subcommand does
    live         `elastic attach` and `elastic stop`
    watch        `elastic watch`
    dryrun       `elastic dryrun`
    prepare      `elastic prepare`
    program      the trainer in a user's program
    doctor       `elastic doctor`
    runs         from what the user names to a store
    show         a checkpoint in words

Imports Ray never, torch only where a subcommand moves tensors.
"""
