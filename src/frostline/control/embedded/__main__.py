"""The main module of the process that ``node.process.subprocess`` starts."""

import os
import sys

from frostline.processors import collector_rests

if __name__ == "__main__":
    with collector_rests():
        from frostline.control.embedded.hosted import main
    status = main(sys.argv[1])
    sys.stdout.flush()
    os._exit(status)  # everything is closed; a regular exit would spend most of a second on taking PyTorch apart
