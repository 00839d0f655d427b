"""What the machine and its process are like: hardware, memory, allocator."""
