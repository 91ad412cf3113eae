"""The recorder in C++: `recorder.cpp` and its headers, the code that builds it, and its Python
side.
"""
