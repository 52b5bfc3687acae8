"""From a prompts file to jobs in the queue."""
