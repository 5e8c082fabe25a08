/* A driver of one graph, compiled against NVIDIA's header, so that what Python hands over is what the driver's
   functions take: their types and the layouts of their structures are checked by the compiler, values here. */

#include <stdlib.h>
#include <string.h>
#include <cuda.h>

#undef cuGraphAddKernelNode
#undef cuGraphNodeGetDependencies
#undef cuGraphNodeGetDependentNodes
#undef cuGraphAddDependencies

#define NODES 64
#define GRAPH ((CUgraph)0x7f0000001000)
#define CONTEXT ((CUcontext)0x7f0000002000)
#define MODULE ((CUmodule)0x7f0000003000)
#define FUNCTION ((CUfunction)0x7f0000004000)

struct node { int type; CUDA_MEMSET_NODE_PARAMS memset; unsigned int grid[3], block[3]; unsigned long long args[5]; };
struct edge { int from, to; CUgraphEdgeData data; };

static struct node nodes[NODES];
static struct edge edges[256];
static int num_nodes, num_edges;
int num_loads, is_broken;

static CUgraphNode handle(int i) { return (CUgraphNode)(0x7f0000010000 + 16 * (size_t)i); }
static int index_of(CUgraphNode node) {
    size_t i = ((size_t)node - 0x7f0000010000) / 16;
    if (i >= (size_t)num_nodes || handle((int)i) != node) abort();
    return (int)i;
}

/* For the test: making the graph, and looking at it. */
void fake_reset(void) { num_nodes = num_edges = num_loads = is_broken = 0; memset(nodes, 0, sizeof nodes); }
void fake_add(int type, unsigned long long dst, unsigned int value, unsigned int size, size_t width) {
    nodes[num_nodes].type = type;
    nodes[num_nodes++].memset = (CUDA_MEMSET_NODE_PARAMS){dst, 0, value, size, width, 1};
}
void fake_link(int from, int to, int port, int type) {
    edges[num_edges++] = (struct edge){from, to, {(unsigned char)port, 0, (unsigned char)type, {0}}};
}
int fake_num_edges(void) { return num_edges; }
void fake_edge(int i, int *out) {
    out[0] = edges[i].from; out[1] = edges[i].to; out[2] = edges[i].data.from_port; out[3] = edges[i].data.type;
}
void fake_kernel(int i, unsigned long long *out) {
    for (int k = 0; k < 3; k++) { out[k] = nodes[i].grid[k]; out[3 + k] = nodes[i].block[k]; }
    for (int k = 0; k < 5; k++) out[6 + k] = nodes[i].args[k];
}

CUresult cuGetErrorName(CUresult error, const char **text) { *text = "CUDA_ERROR_FAKE"; return 0; }
CUresult cuCtxGetCurrent(CUcontext *context) { *context = CONTEXT; return 0; }
CUresult cuCtxGetDevice(CUdevice *device) { *device = 3; return 0; }
CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
    if (pointer < 0x7f1000000000) return CUDA_ERROR_INVALID_VALUE;
    if (attribute == CU_POINTER_ATTRIBUTE_MEMORY_TYPE) *(unsigned int *)data = CU_MEMORYTYPE_DEVICE;
    else if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) *(int *)data = pointer & 1 ? 4 : 3;
    else return CUDA_ERROR_INVALID_VALUE;
    return 0;
}
CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    num_loads++;
    if (is_broken == 1 || strstr(image, ".entry gapless_fill(") == NULL) return CUDA_ERROR_INVALID_PTX;
    *module = MODULE;
    return 0;
}
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    if (module != MODULE || strcmp(name, "gapless_fill")) return CUDA_ERROR_NOT_FOUND;
    *function = FUNCTION;
    return 0;
}
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    if (function != FUNCTION || attribute != CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK) return CUDA_ERROR_INVALID_VALUE;
    *value = 1024;
    return is_broken == 3 ? CUDA_ERROR_NO_BINARY_FOR_GPU : 0;
}
CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode *out, size_t *count) {
    size_t alive = 0;
    if (graph != GRAPH) return CUDA_ERROR_INVALID_VALUE;
    for (int i = 0; i < num_nodes; i++) {
        if (nodes[i].type < 0) continue;
        if (out) out[alive] = handle(i);
        alive++;
    }
    *count = alive;
    return 0;
}
CUresult cuGraphNodeGetType(CUgraphNode node, CUgraphNodeType *type) {
    *type = (CUgraphNodeType)nodes[index_of(node)].type;
    return is_broken == 2 ? CUDA_ERROR_INVALID_VALUE : 0;
}
CUresult cuGraphMemsetNodeGetParams(CUgraphNode node, CUDA_MEMSET_NODE_PARAMS *params) {
    *params = nodes[index_of(node)].memset;
    return 0;
}
static CUresult neighbours(CUgraphNode node, int forward, CUgraphNode *out, CUgraphEdgeData *data, size_t *count) {
    int me = index_of(node);
    size_t found = 0;
    for (int i = 0; i < num_edges; i++) {
        if ((forward ? edges[i].from : edges[i].to) != me) continue;
        if (found == *count) return 0;
        out[found] = handle(forward ? edges[i].to : edges[i].from);
        data[found++] = edges[i].data;
    }
    for (size_t i = found; i < *count; i++) out[i] = NULL;
    *count = found;
    return 0;
}
CUresult cuGraphNodeGetDependencies_v2(CUgraphNode node, CUgraphNode *out, CUgraphEdgeData *data, size_t *count) {
    return neighbours(node, 0, out, data, count);
}
CUresult cuGraphNodeGetDependentNodes_v2(CUgraphNode node, CUgraphNode *out, CUgraphEdgeData *data, size_t *count) {
    return neighbours(node, 1, out, data, count);
}
CUresult cuGraphAddKernelNode_v2(CUgraphNode *node, CUgraph graph, const CUgraphNode *after, size_t num_after,
                                 const CUDA_KERNEL_NODE_PARAMS *params) {
    struct node *new = &nodes[num_nodes];
    if (graph != GRAPH || after || num_after || params->func != FUNCTION || params->sharedMemBytes || params->extra)
        return CUDA_ERROR_INVALID_VALUE;
    new->type = CU_GRAPH_NODE_TYPE_KERNEL;
    unsigned int grid[] = {params->gridDimX, params->gridDimY, params->gridDimZ};
    unsigned int block[] = {params->blockDimX, params->blockDimY, params->blockDimZ};
    memcpy(new->grid, grid, sizeof grid);
    memcpy(new->block, block, sizeof block);
    for (int i = 0; i < 4; i++) new->args[i] = *(unsigned long long *)params->kernelParams[i];
    new->args[4] = *(unsigned int *)params->kernelParams[4];
    *node = handle(num_nodes++);
    return 0;
}
CUresult cuGraphAddDependencies_v2(CUgraph graph, const CUgraphNode *from, const CUgraphNode *to,
                                   const CUgraphEdgeData *data, size_t count) {
    if (graph != GRAPH) return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < count; i++) edges[num_edges++] = (struct edge){index_of(from[i]), index_of(to[i]), data[i]};
    return 0;
}
CUresult cuGraphDestroyNode(CUgraphNode node) {
    int me = index_of(node), kept = 0;
    nodes[me].type = -1;
    for (int i = 0; i < num_edges; i++)
        if (edges[i].from != me && edges[i].to != me) edges[kept++] = edges[i];
    num_edges = kept;
    return 0;
}
