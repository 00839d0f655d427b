"""The process of a node that ``node.process`` starts: the node, its control plane and its pages."""

import os
import sys

from frostline.core.system import imports_stay

if __name__ == "__main__":
    with imports_stay():
        from frostline.control.hosted import main
    status = main(sys.stdin.readline())
    sys.stdout.flush()
    os._exit(status)  # everything is closed; a regular exit would spend most of a second on taking PyTorch apart
