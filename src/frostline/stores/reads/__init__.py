"""How objects are read: ranges joined, shared and read ahead."""
