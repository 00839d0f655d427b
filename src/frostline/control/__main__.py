"""The process of a node that ``node.process`` starts: the node, its control plane and its pages."""

import os
import sys

from frostline.core.system import collector_rests

if __name__ == "__main__":
    with collector_rests():
        from frostline.control.hosted import main
    status = main(sys.stdin.readline())
    sys.stdout.flush()
    os._exit(status)  # everything is closed; a regular exit would spend most of a second on taking PyTorch apart
