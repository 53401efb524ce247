"""What is learned: the protocol of a task, and the tasks that come with the package."""
