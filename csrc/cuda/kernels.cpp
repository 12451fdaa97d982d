// The machine code of kernels.cu, if there was an nvcc to compile it.
#include "device.h"

#ifdef KVTIER_KERNELS
asm(".section .rodata\n"
    ".balign 64\n"
    "kvtier_fatbin: .incbin \"" KVTIER_KERNELS "\"\n"
    ".previous\n");
extern "C" __attribute__((visibility("hidden"))) const char kvtier_fatbin[];
const void* kvtier::kernels() { return kvtier_fatbin; }
const char* kvtier::architectures() { return KVTIER_ARCHITECTURES; }
#else
const void* kvtier::kernels() { return nullptr; }
const char* kvtier::architectures() { return ""; }
#endif
