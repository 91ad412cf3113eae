"""The recorder in C++: `recorder.cpp`, what builds it, and Python's side of it."""
