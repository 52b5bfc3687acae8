"""Models: where they are, what identifies them, how they turn text into token ids."""
