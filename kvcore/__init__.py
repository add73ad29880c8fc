"""The cache itself: plain, synchronous, single-threaded Python that knows no wire."""
