"""The recorder in C++: `recorder.cpp` and its headers, the code that builds it, and the
Python side of it.
"""
