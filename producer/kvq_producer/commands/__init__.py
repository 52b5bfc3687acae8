"""The sub-commands of `kvq`, one module each."""
