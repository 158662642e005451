// What the simulated runtime offers to the simulated operators and collectives.
#pragma once
#include <functional>

#include "acl/acl.h"

// Work of a stream; returns 0 or an error code, after which the stream does nothing more.
using Work = std::function<int()>;

// Append work to a stream; while the stream is captured, to its graph. Returns 0 or an error code.
int sim_enqueue(aclrtStream stream, Work work);

// Whether the stream is captured.
bool sim_capturing(aclrtStream stream);

// The next work of any stream of the device fails, and so does everything behind it.
void sim_lose_device(int device);
