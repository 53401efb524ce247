"""The state of a run in the forms of other systems, and back.

    hf_export   weights, configuration and tokenizer as a Hugging Face directory
    hf_import   weights of such a directory as a checkpoint
    dcp_export  weights and optimizer as torch.distributed.checkpoint writes them
    dcp_import  the reverse; `dcp_metadata` reads what is a pickle there, without running any of it

All of them move the state piece by piece: no model is ever in memory as a whole.
"""
