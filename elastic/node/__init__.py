"""What runs on a node beside its workers: agent, uploader, snapshot holder."""
