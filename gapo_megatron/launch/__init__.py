"""What a job runs before and after training: its checks, its frozen code, its postmortem."""
