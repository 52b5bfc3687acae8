"""`python -m kvq_producer` is the `kvq` command."""

from __future__ import annotations

from kvq_producer.cli import main

if __name__ == "__main__":
    main()
