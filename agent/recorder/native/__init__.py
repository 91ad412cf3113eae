"""The recorder in C++: `recorder.cpp` and its headers, its Python side, and the code to build it."""
