// Reads the Python frames of the calling thread without the GIL, from the interpreter's structs.

#pragma once

#include <cstdint>
#include <cstring>

extern "C" char* PyGILState_GetThisThreadState(void); // may be called without the GIL

namespace {

struct FrameLayout { // byte offsets in the interpreter's structs; cache.py has the values
  int32_t indirect; // the pointer in a thread state to the struct with `newest`; -1: itself
  int32_t newest; // the pointer in that struct to the newest frame
  int32_t back, code, instruction; // fields of a frame
};

FrameLayout frame_layout;

struct CodePosition { // an instruction of a code object, both kept alive by Python
  uint64_t code;
  // The low half of its address or number, which is enough within one code object.
  uint32_t instruction;
  bool operator==(const CodePosition& other) const {
    return code == other.code && instruction == other.instruction;
  }
};

template <class T>
T read_field(const char* base, int32_t offset) {
  T value;
  memcpy(&value, base + offset, sizeof value);
  return value;
}

// Visits the frames of the calling thread, newest first, until `visit` returns false. They do not
// change while the thread is in this function, so no lock is needed.
template <class Visit> // bool(CodePosition)
void walk_frames(Visit visit) {
  const char* thread = PyGILState_GetThisThreadState();
  if (!thread)
    return;
  const char* holder = thread;
  if (frame_layout.indirect >= 0)
    holder = read_field<const char*>(thread, frame_layout.indirect);
  const char* frame = holder ? read_field<const char*>(holder, frame_layout.newest) : nullptr;
  while (frame) {
    const CodePosition position{
        read_field<uint64_t>(frame, frame_layout.code),
        read_field<uint32_t>(frame, frame_layout.instruction)};
    if (!visit(position))
      return;
    frame = read_field<const char*>(frame, frame_layout.back);
  }
}

} // namespace
