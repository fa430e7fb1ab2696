/* A fake cuda-checkpoint program, with the options of the real one. */
#define _GNU_SOURCE
#include "fabric.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const STATES[] = {"running", "locked", "checkpointed", "failed"};

static int fail(const char *action, int result) {
    const char *why = result == NOT_READY       ? "device not ready"
                      : result == INVALID_VALUE ? "invalid argument"
                      : result == ILLEGAL_STATE ? "the operation cannot be performed in the present state"
                      : result == NOT_SUPPORTED ? "operation not supported"
                      : result == OUT_OF_MEMORY ? "out of memory"
                                                : "unknown error";
    fprintf(stderr, "Error while trying to %s: \"%s\"\n", action, why);
    return 1;
}

int main(int argc, char **argv) {
    const char *action = NULL, *map = NULL;
    int pid = 0, get_state = 0, result;
    unsigned timeout_ms = 0, n = 0;
    uint32_t state;
    struct pair pairs[MAX_DEVICES];
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : "";
        if (!strcmp(argv[i], "--get-state"))
            get_state = 1;
        else if (!strcmp(argv[i], "--action"))
            action = value, i++;
        else if (!strcmp(argv[i], "--pid"))
            pid = atoi(value), i++;
        else if (!strcmp(argv[i], "--timeout"))
            timeout_ms = atoi(value), i++;
        else if (!strcmp(argv[i], "--device-map"))
            map = value, i++;
        else {
            fprintf(stderr, "unknown option %s\n", argv[i]);
            return 2;
        }
    }
    if (get_state) {
        result = process_state(pid, &state);
        if (result)
            return fail("get the state", result);
        puts(STATES[state]);
        return 0;
    }
    while (map && n < MAX_DEVICES && sscanf(map, "%47[^=]=%47[^,]", pairs[n].from, pairs[n].to) == 2) {
        n++;
        map = strchr(map, ',');
        map = map ? map + 1 : NULL;
    }
    if (!action)
        return 2;
    if (!strcmp(action, "lock"))
        result = process_lock(pid, timeout_ms);
    else if (!strcmp(action, "checkpoint"))
        result = process_checkpoint(pid);
    else if (!strcmp(action, "restore"))
        result = process_restore(pid, pairs, n);
    else if (!strcmp(action, "unlock"))
        result = process_unlock(pid);
    else
        return 2;
    return result ? fail(action, result) : 0;
}
