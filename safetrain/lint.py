"""Find, by reading the code, what makes distributed training hang or go wrong. Nothing is imported or run.

    python -m safetrain.lint train.py [more files and folders]
    python -m safetrain.lint --explain ST101

The folder that it is called in is searched last: a user's ``ast.py`` must not be run instead of Python's own.
"""

from __future__ import annotations

import sys

from safetrain.user_path import search_user_code_last


def main() -> int:
    """See to the import path; then import and work."""
    search_user_code_last()
    from safetrain import lint_command

    return lint_command.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
