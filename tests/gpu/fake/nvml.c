/* A fake libnvidia-ml.so.1: devices, and which processes are on them. */
#define _GNU_SOURCE
#include "fabric.h"

#include <stdio.h>
#include <string.h>

enum { OK, UNINITIALIZED, BAD_ARGUMENT, UNSUPPORTED, TOO_SMALL = 7, UNKNOWN = 999 };

struct process_info {
    unsigned pid;
    unsigned long long bytes;
    unsigned gpu_instance, compute_instance;
};

struct memory {
    unsigned long long total, free, used;
};

static struct device devices[MAX_DEVICES];
static int n_devices;

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    n_devices = fabric_devices(devices);
    return OK;
}

int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

int nvmlShutdown(void) { return OK; }

const char *nvmlErrorString(int result) {
    (void)result;
    return "fake NVML error";
}

int nvmlSystemGetDriverVersion(char *text, unsigned size) { return fabric_driver(text, size) ? OK : UNKNOWN; }

int nvmlDeviceGetCount_v2(unsigned *n) {
    *n = n_devices;
    return OK;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, struct device **device) {
    if (index >= (unsigned)n_devices)
        return BAD_ARGUMENT;
    *device = &devices[index];
    return OK;
}

int nvmlDeviceGetName(struct device *device, char *text, unsigned size) {
    snprintf(text, size, "%s", device->model);
    return OK;
}

int nvmlDeviceGetUUID(struct device *device, char *text, unsigned size) {
    snprintf(text, size, "%s", device->uuid);
    return OK;
}

int nvmlDeviceGetMinorNumber(struct device *device, unsigned *minor) {
    *minor = device->minor;
    return OK;
}

int nvmlDeviceGetMigMode(struct device *device, unsigned *current, unsigned *pending) {
    *current = *pending = device->mig;
    return OK;
}

static int processes(struct device *device, unsigned *n, struct process_info *infos, unsigned mps) {
    pid_t pids[256];
    static struct page pages[256];
    unsigned found = 0, room = infos ? *n : 0;
    int total = device->mps == mps ? fabric_processes(pids, pages, 256) : 0;
    for (int i = 0; i < total; i++)
        for (unsigned d = 0; pages[i].state < CHECKPOINTED && d < pages[i].n_used; d++)
            if (!strcmp(pages[i].uuids[d], device->uuid)) {
                struct process_info info = {pids[i], (unsigned long long)pages[i].mebibytes << 20, -1, -1};
                if (found < room)
                    infos[found] = info;
                found++;
            }
    *n = found;
    return found > room ? TOO_SMALL : OK;
}

int nvmlDeviceGetComputeRunningProcesses_v3(struct device *device, unsigned *n, struct process_info *infos) {
    return processes(device, n, infos, 0);
}

int nvmlDeviceGetMPSComputeRunningProcesses_v3(struct device *device, unsigned *n,
                                               struct process_info *infos) {
    return processes(device, n, infos, 1);
}

int nvmlDeviceGetMemoryInfo(struct device *device, struct memory *memory) {
    struct process_info infos[256];
    unsigned n = 256;
    processes(device, &n, infos, device->mps);
    memory->total = device->bytes;
    memory->used = 0;
    for (unsigned i = 0; i < n; i++)
        memory->used += infos[i].bytes;
    memory->free = memory->total - memory->used;
    return OK;
}
