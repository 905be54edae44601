#include "common/comm/nccl/nccl_calls.h"

#include "common/comm/nccl/nccl_ranks.h"

namespace lockstep {
namespace {

using Op = Call::Op;

ncclDataType_t nccl_type(ElementType type) {
  switch (type) {
    case ElementType::f32:
      return ncclFloat32;
    case ElementType::f64:
      return ncclFloat64;
    case ElementType::i64:
      return ncclInt64;
  }
  return ncclNumTypes;
}

/// Makes one rank's calls to NCCL.
struct Caller {
  const Call& call;
  int rank, world_size;
  ncclComm_t comm;
  cudaStream_t stream;
  const std::string& who;

  void check(ncclResult_t status, const char* function) const {
    check_nccl(status, function, who, comm);
  }
  void send(const Elements& x, int to) const {
    check(ncclSend(x.data, x.count, nccl_type(x.type), to, comm, stream), "ncclSend");
  }
  void receive(const Elements& x, int from) const {
    check(ncclRecv(x.data, x.count, nccl_type(x.type), from, comm, stream), "ncclRecv");
  }
  /// Part `of_rank` of the root's `all`.
  Elements part(int of_rank) const {
    return call.all.part(of_rank * call.mine.count, call.mine.count);
  }
  // NCCL has these two only from version 2.28 on.
  void gather() const {
    for (int other = 0; rank == call.peer && other < world_size; ++other) {
      receive(part(other), other);
    }
    send(call.mine, call.peer);
  }
  void scatter() const {
    for (int other = 0; rank == call.peer && other < world_size; ++other) {
      send(part(other), other);
    }
    receive(call.mine, call.peer);
  }
};

}  // namespace

void issue_to_nccl(const Call& call, int rank, int world_size, ncclComm_t comm, cudaStream_t stream,
                   const std::string& who) {
  const Caller caller{call, rank, world_size, comm, stream, who};
  void* const mine = call.mine.data;
  void* const all = call.all.data;
  const size_t count = static_cast<size_t>(call.mine.count);
  const ncclDataType_t type = nccl_type(call.mine.type);
  const ncclRedOp_t reduction = call.reduction == Reduction::average ? ncclAvg : ncclSum;
  switch (call.op) {
    case Op::all_reduce:
    case Op::barrier:
      return caller.check(ncclAllReduce(mine, mine, count, type, reduction, comm, stream),
                          "ncclAllReduce");
    case Op::broadcast:
      return caller.check(ncclBroadcast(mine, mine, count, type, call.peer, comm, stream),
                          "ncclBroadcast");
    case Op::all_gather:
      return caller.check(ncclAllGather(mine, all, count, type, comm, stream), "ncclAllGather");
    case Op::reduce_scatter:
      return caller.check(ncclReduceScatter(all, mine, count, type, reduction, comm, stream),
                          "ncclReduceScatter");
    case Op::reduce:  // only the root's x changes
      return caller.check(ncclReduce(mine, rank == call.peer ? mine : nullptr, count, type,
                                     reduction, call.peer, comm, stream),
                          "ncclReduce");
    case Op::gather:
      return caller.gather();
    case Op::scatter:
      return caller.scatter();
    case Op::send:
      return caller.send(call.mine, call.peer);
    case Op::receive:
      return caller.receive(call.mine, call.peer);
  }
}

}  // namespace lockstep
