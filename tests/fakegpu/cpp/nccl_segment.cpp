// The memory that the members of a communicator share, and how they wait for each other: a futex, no spinning.
#include "nccl.h"

#include <cstdio>
#include <fcntl.h>
#include <linux/futex.h>
#include <new>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace fakegpu::nccl {

namespace {

size_t slots_offset() { return (sizeof(Header) + 4095) / 4096 * 4096; }
size_t mail_offset(int size) { return slots_offset() + static_cast<size_t>(size) * kSlotBytes; }
size_t mail_stride() { return 4096 + kMailBytes; }
size_t segment_bytes(int size) { return mail_offset(size) + static_cast<size_t>(size) * size * mail_stride(); }

std::string segment_path(const std::string& name) { return "/dev/shm/fakegpu-" + name; }

} // namespace

Segment::Segment(const std::string& name, int size, int rank) : size_(size), bytes_(segment_bytes(size)) {
    const std::string path = segment_path(name);
    // Sparse: only touched pages take memory. A new file is all zeros, which is the initial state.
    const int file = open(path.c_str(), O_RDWR | O_CREAT, 0600);
    if (file < 0 || ftruncate(file, static_cast<off_t>(bytes_)) != 0) {
        std::perror(path.c_str());
        throw std::bad_alloc();
    }
    void* base = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (base == MAP_FAILED) throw std::bad_alloc();
    header_ = static_cast<Header*>(base);
    header_->ranks[rank].pid = getpid();
    header_->ranks[rank].joined = 1;
    const uint32_t joined = ++header_->joined;
    notify();
    while (header_->joined < static_cast<uint32_t>(size)) wait(header_->signal);
    if (joined == static_cast<uint32_t>(size)) unlink(path.c_str()); // the mappings keep it alive
}

Segment::~Segment() { munmap(header_, bytes_); }

char* Segment::slot(int index) {
    return reinterpret_cast<char*>(header_) + slots_offset() + static_cast<size_t>(index) * kSlotBytes;
}

Mailbox& Segment::mailbox(int from, int to) {
    char* base = reinterpret_cast<char*>(header_) + mail_offset(size_);
    return *reinterpret_cast<Mailbox*>(base + (static_cast<size_t>(from) * size_ + to) * mail_stride());
}

char* Segment::mail(int from, int to) { return reinterpret_cast<char*>(&mailbox(from, to)) + 4096; }

void Segment::notify() {
    ++header_->signal;
    syscall(SYS_futex, &header_->signal, FUTEX_WAKE, 1 << 30, nullptr, nullptr, 0);
}

void Segment::wait(uint32_t seen) {
    const timespec limit{0, 50'000'000};
    syscall(SYS_futex, &header_->signal, FUTEX_WAIT, seen, &limit, nullptr, 0);
}

} // namespace fakegpu::nccl
