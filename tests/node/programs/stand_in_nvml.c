/* A stand-in for libnvidia-ml.so.1, for tests of the real pynvml: STAND_IN_GPUS GPUs (default 2). The last one computes;
 * the process whose id is in the file STAND_IN_PID uses it. The GPUs are of a kind without an energy counter. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NOT_SUPPORTED 3
#define INSUFFICIENT_SIZE 7

static unsigned count(void) {
    const char *text = getenv("STAND_IN_GPUS");
    return text ? (unsigned)atoi(text) : 2;
}

static unsigned index_of(void *device) { return (unsigned)(size_t)device - 1; }

int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return "stand-in"; }
int nvmlDeviceGetCount_v2(unsigned *found) { *found = count(); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { *device = (void *)(size_t)(index + 1); return 0; }
int nvmlDeviceGetMigMode(void *device, unsigned *current, unsigned *pending) { return NOT_SUPPORTED; }

int nvmlDeviceGetUUID(void *device, char *text, unsigned size) {
    snprintf(text, size, "GPU-%08u-aaaa", index_of(device));
    return 0;
}

int nvmlDeviceGetName(void *device, char *text, unsigned size) {
    snprintf(text, size, "Stand-in");
    return 0;
}

int nvmlDeviceGetUtilizationRates(void *device, unsigned *rates) {
    rates[0] = index_of(device) + 1 == count() ? 93 : 0;
    rates[1] = 0;
    return 0;
}

int nvmlDeviceGetMemoryInfo_v2(void *device, unsigned long long *memory) {
    memory[1] = 80ull << 30; /* after the version: total, reserved, free, used */
    memory[2] = 0;
    memory[3] = 50ull << 30;
    memory[4] = 30ull << 30;
    return 0;
}

int nvmlDeviceGetPowerUsage(void *device, unsigned *milliwatts) { *milliwatts = 250000; return 0; }
int nvmlDeviceGetTotalEnergyConsumption(void *device, unsigned long long *millijoules) { return NOT_SUPPORTED; }

int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *found, char *infos) {
    const char *path = getenv("STAND_IN_PID");
    FILE *file = path && index_of(device) + 1 == count() ? fopen(path, "r") : NULL;
    unsigned pid = 0;
    if (file) {
        if (fscanf(file, "%u", &pid) != 1) pid = 0;
        fclose(file);
    }
    if (!pid) { *found = 0; return 0; }
    if (!infos || !*found) { *found = 1; return INSUFFICIENT_SIZE; }
    *found = 1;
    memcpy(infos, &pid, sizeof pid);
    return 0;
}
