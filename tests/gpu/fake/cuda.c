/* A fake libcuda.so.1: the process checkpoint calls, and what the bindings need to find them. */
#define _GNU_SOURCE
#include "fabric.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct lock_args {
    unsigned timeout_ms;
    unsigned reserved0;
    uint64_t reserved1[7];
};

struct gpu_pair {
    unsigned char from[16], to[16];
};

struct restore_args {
    struct gpu_pair *pairs;
    unsigned n_pairs;
};

static int initialized;

static void as_text(const unsigned char *bytes, char *text) {
    int n = sprintf(text, "GPU-");
    for (int i = 0; i < 16; i++)
        n += sprintf(text + n, i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x", bytes[i]);
}

int cuInit(unsigned flags) {
    struct device devices[MAX_DEVICES];
    (void)flags;
    if (!fabric_devices(devices))
        return NO_DEVICE;
    initialized = 1;
    return SUCCESS;
}

int cuDriverGetVersion(int *version) {
    *version = 13000;
    return SUCCESS;
}

int cuGetErrorName(int error, const char **name) {
    (void)error;
    *name = "CUDA_ERROR";
    return SUCCESS;
}

int cuCheckpointProcessGetState(int pid, uint32_t *state) { return process_state(pid, state); }

int cuCheckpointProcessLock(int pid, struct lock_args *args) {
    return process_lock(pid, args ? args->timeout_ms : 0);
}

int cuCheckpointProcessCheckpoint(int pid, void *args) {
    (void)args;
    return process_checkpoint(pid);
}

int cuCheckpointProcessRestore(int pid, struct restore_args *args) {
    struct pair pairs[MAX_DEVICES];
    unsigned n = args ? args->n_pairs : 0;
    if (!initialized)
        return NOT_INITIALIZED; /* persistence mode is off */
    char version[64] = "";
    fabric_driver(version, sizeof version);
    if (n > MAX_DEVICES || (n && atoi(version) < 580))
        return INVALID_VALUE; /* older drivers know no maps */
    for (unsigned i = 0; i < n; i++) {
        as_text(args->pairs[i].from, pairs[i].from);
        as_text(args->pairs[i].to, pairs[i].to);
    }
    return process_restore(pid, pairs, n);
}

int cuCheckpointProcessUnlock(int pid, void *args) {
    (void)args;
    return process_unlock(pid);
}

int cuCheckpointProcessGetRestoreThreadId(int pid, int *tid) {
    *tid = pid;
    return SUCCESS;
}

int cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status) {
    void *self = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    (void)version;
    (void)flags;
    /* The bindings ask under the unversioned name. */
    *function = !strcmp(symbol, "cuGetProcAddress") ? (void *)cuGetProcAddress_v2 : dlsym(self, symbol);
    if (status)
        *status = *function ? 0 : 1;
    return *function ? SUCCESS : NOT_FOUND;
}
