/* The pretended GPUs of one test: what the fake driver, the fake NVML and the fake program share.
 *
 * A process "holds a GPU" by mapping the file gpu-page of FAKE_CUDA_DIR privately (see
 * tests/workloads/fake_gpu.py): its first page says in what state the process is, and a thread of the process
 * plays the part that the real driver plays inside it. So a frozen process answers nothing, and the state
 * travels with the memory of the process. Files of FAKE_CUDA_DIR:
 *   id        32 hexadecimal digits that every page of this fabric bears
 *   devices   one line a GPU: uuid|model|bytes|minor|mig (0 or 1)|mps (0 or 1)
 *   driver    the driver's version, one line
 *   inject    lines: pid or *, action, milliseconds to wait before, CUresult to fail with (0: go on)
 *   together  pids whose locks complete only when all of them are wanted
 *   calls     written: one line for each call that changed something
 */
#ifndef FABRIC_H
#define FABRIC_H

#include <stdint.h>
#include <sys/types.h>

#define MAX_DEVICES 8
#define UUID_TEXT 48
#define PAGE_BYTES 1024

enum { RUNNING, LOCKED, CHECKPOINTED, FAILED };
enum { NOTHING, LOCK, CHECKPOINT, RESTORE, UNLOCK, CANCEL };
enum { PENDING = 0xffffffffu };

/* CUresult, as far as it is used here. */
enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    ILLEGAL_STATE = 401,
    NOT_FOUND = 500,
    NOT_READY = 600,
    NOT_SUPPORTED = 801,
};

/* The page, as Python's struct module sees it too. */
struct page {
    char magic[8]; /* FAKEGPU1 */
    char id[32];
    uint32_t state;
    uint32_t request;
    uint32_t answer;
    uint32_t n_devices; /* that the process sees */
    uint32_t mebibytes; /* on each device that it uses */
    uint32_t n_used;    /* the first ones */
    char uuids[MAX_DEVICES][UUID_TEXT];
    char wanted[MAX_DEVICES][UUID_TEXT]; /* where a restore shall go */
};

struct device {
    char uuid[UUID_TEXT];
    char model[64];
    unsigned long long bytes;
    unsigned minor, mig, mps;
};

struct pair {
    char from[UUID_TEXT], to[UUID_TEXT];
};

int fabric_devices(struct device *devices);
int fabric_driver(char *text, unsigned size);
/* Processes that hold a GPU of this fabric; their pages too. */
int fabric_processes(pid_t *pids, struct page *pages, int limit);
int process_state(pid_t pid, uint32_t *state);
int process_lock(pid_t pid, unsigned timeout_ms);
int process_checkpoint(pid_t pid);
int process_restore(pid_t pid, const struct pair *pairs, unsigned n_pairs);
int process_unlock(pid_t pid);

#endif
