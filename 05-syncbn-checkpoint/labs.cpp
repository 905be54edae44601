// Five mistakes in synchronising batch normalisation and in saving. Run each with the mistake, and
// without it.
//
//   build/05-syncbn-checkpoint/labs plain-batch-norm
//   build/05-syncbn-checkpoint/labs plain-batch-norm --fixed
//
// Two ranks, unless a launcher starts more.

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>

#include "05-syncbn-checkpoint/checkpointer.h"
#include "05-syncbn-checkpoint/sync_batchnorm.h"
#include "common/training/lab.h"
#include "common/training/weights_file.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kLabBatch = 64;  // of all ranks together

// --- Plain batch normalisation -------------------------------------------------------------------

/// The gradient of a batch that is taken in `parts`, one after another on this device.
std::vector<Real> gradient_in_parts(RankTraining& training, const HostBatch& batch,
                                    const BatchSplit& parts) {
  training.forward_and_backward(batch, parts.divide(kLabBatch), 1.0 / kLabBatch);
  return training.parameters.gradients().to_host();
}

/// The gradient of a batch that is dealt to the ranks, which normalise it as `statistics` says.
std::vector<Real> gradient_of_ranks(RankTraining& training, const HostBatch& batch,
                                    const BatchPart& mine,
                                    const std::shared_ptr<BatchStatistics>& statistics) {
  for (BatchNorm2d* layer : batch_norms(*training.model.network)) {
    layer->set_statistics(statistics);
  }
  training.forward_and_backward(batch, {mine}, double(training.comm.world_size()) / kLabBatch);
  training.comm.all_reduce(training.stream, training.parameters.gradients(), Reduction::average);
  return training.parameters.gradients().to_host();
}

/// If parts normalise themselves, their gradient is not the batch's. Without the mistake each part
/// is a rank's.
void plain_batch_norm(ProcessGroup& group, bool fixed) {
  RankTraining training(group, ModelKind::seed_bn);
  const HostBatch batch = training.first_batch(kLabBatch);
  const std::vector<Real> whole = gradient_in_parts(training, batch, {});
  const auto report = [&](int64_t parts, const char* how, const std::vector<Real>& found) {
    say(group, fmt::format("{:2} parts, {}: relative error of the gradient {:.1e}", parts, how,
                           relative_error(found, whole)));
  };
  if (fixed) {
    const BatchSplit dealt{BatchSplit::Kind::stride, group.world_size()};
    const BatchPart mine = dealt.divide(kLabBatch).at(size_t(group.rank()));
    report(
        group.world_size(), "normalised together",
        gradient_of_ranks(training, batch, mine,
                          std::make_shared<SyncBatchNorm>(training.comm, training.communication)));
    return;
  }
  for (const int64_t parts : {2, 4, 8, 16}) {
    report(parts, "each normalised by itself",
           gradient_in_parts(training, batch, {BatchSplit::Kind::stride, parts}));
  }
}

// --- Averaged variances --------------------------------------------------------------------------

/// The mistake: two all-reduces in place of the all-gather. Means may be averaged if the parts are
/// equal, but M2s are distances from different means: the distances between the means are missing.
class AveragedVariances final : public BatchStatistics {
 public:
  explicit AveragedVariances(Communicator& comm) : comm_(comm) {}

  Rows merge(const Tensor& statistics, int64_t, const BatchNorm2d& layer,
             Context& context) override {
    const int64_t channels = layer.channels();
    comm_.all_reduce(context.stream(), statistics.range(0, {channels}), Reduction::average);
    comm_.all_reduce(context.stream(), statistics.range(channels, {channels + 1}));
    return Rows::several;
  }
  void merge_sums(const Tensor& sums, const BatchNorm2d&, Context& context) override {
    comm_.all_reduce(context.stream(), sums);
  }

 private:
  Communicator& comm_;
};

/// Every second rank's images are lighter, as if from another camera.
void lighten(HostBatch& batch, Dataset& set, const std::vector<BatchPart>& parts) {
  for (size_t part = 1; part < parts.size(); part += 2) {
    const auto first = set.images.begin() + parts[part].first * set.image_bytes();
    std::for_each(first, first + parts[part].count * set.image_bytes(),
                  [](uint8_t& pixel) { pixel = uint8_t(255 - (255 - pixel) / 2); });
  }
  batch.images = set.images.data();
}

/// Mean, M2 and rows [3] of the pixels of a part.
Tensor pixel_statistics(RankTraining& training, const HostBatch& batch, const BatchPart& part) {
  const Tensor images = training.feeder.normalize(
      training.feeder.feed(batch, part, training.context), training.context);
  const Tensor statistics = training.context.empty({3});
  training.context.kernels().batch_norm_statistics(training.stream, images, statistics);
  return statistics;
}

/// M2 / rows
double variance_in(const Tensor& statistics) {
  const std::vector<Real> values = statistics.to_host();
  return double(values[1]) / double(values[2]);
}

void averaged_variances(ProcessGroup& group, bool fixed) {
  RankTraining training(group, ModelKind::seed_bn);
  const std::vector<BatchPart> parts =
      BatchSplit{BatchSplit::Kind::chunk, group.world_size()}.divide(kLabBatch);
  const BatchPart mine = parts.at(size_t(group.rank()));
  HostBatch batch = training.first_batch(kLabBatch);
  lighten(batch, training.set, parts);
  const double variance = variance_in(pixel_statistics(training, batch, {0, 1, kLabBatch}));
  const std::vector<Real> whole = gradient_in_parts(training, batch, {});

  std::shared_ptr<BatchStatistics> statistics = std::make_shared<AveragedVariances>(training.comm);
  if (fixed) {
    statistics = std::make_shared<SyncBatchNorm>(training.comm, training.communication);
  }
  const Tensor merged = pixel_statistics(training, batch, mine);
  statistics->merge(merged, mine.count * training.set.image_bytes(), BatchNorm2d(1),
                    training.context);
  const double error = std::abs(variance_in(merged) / variance - 1);
  const std::vector<Real> found = gradient_of_ranks(training, batch, mine, statistics);
  say(group, fmt::format("variances {}: relative error of the pixels' variance {:.1e}, of the "
                         "gradient {:.1e}",
                         fixed ? "merged" : "averaged", error, relative_error(found, whole)));
}

// --- Sums of squares -----------------------------------------------------------------------------

/// Numbers of spread 1 around a mean, as float32 holds them.
std::vector<Real> numbers_around(double mean) {
  std::mt19937 random(1);
  std::vector<Real> numbers(12544);  // 64 images of 14 x 14
  for (Real& x : numbers) x = Real(float(mean + std::sqrt(12) * (random() / 4294967296.0 - 0.5)));
  return numbers;
}

double variance_of(const std::vector<Real>& numbers) {
  double mean = 0, m2 = 0;
  for (const Real x : numbers) mean += double(x) / double(numbers.size());
  for (const Real x : numbers) m2 += std::pow(double(x) - mean, 2);
  return m2 / double(numbers.size());
}

/// The mistake: the mean of the squares minus the square of the mean. The ranks add up in float64,
/// but send float32.
double variance_from_squares(RankTraining& training, const std::vector<Real>& mine) {
  double sum = 0, squares = 0;
  for (const Real x : mine) sum += double(x), squares += double(x) * double(x);
  const auto sums = BasicTensor<float>::from_host(training.stream, {3},
                                                  {float(sum), float(squares), float(mine.size())});
  training.comm.all_reduce(training.stream, sums);
  const std::vector<float> all = sums.to_host();
  const float mean = all[0] / all[2], mean_of_squares = all[1] / all[2];
  return mean_of_squares - mean * mean;
}

double variance_from_merge(RankTraining& training, const std::vector<Real>& mine) {
  const int64_t count = std::ssize(mine);
  const Tensor statistics = training.context.empty({3});
  training.context.kernels().batch_norm_statistics(
      training.stream, Tensor::from_host(training.stream, {count, 1}, mine), statistics);
  SyncBatchNorm(training.comm, training.communication)
      .merge(statistics, count, BatchNorm2d(1), training.context);
  return variance_in(statistics);
}

void sum_of_squares(ProcessGroup& group, bool fixed) {
  RankTraining training(group);
  for (const double mean : {0, 10, 100, 1000, 10000}) {
    const std::vector<Real> all = numbers_around(mean);
    std::vector<Real> mine;
    for (size_t i = size_t(group.rank()); i < all.size(); i += size_t(group.world_size())) {
      mine.push_back(all[i]);
    }
    const double expected = variance_of(all), found = fixed ? variance_from_merge(training, mine)
                                                            : variance_from_squares(training, mine);
    say(group, fmt::format("mean {:5}: variance {:.6f}, found {:.6f}, relative error {:.1e}", mean,
                           expected, found, std::abs(found / expected - 1)));
  }
}

// --- What the labs about saving share ------------------------------------------------------------

/// Calls work(directory) on all ranks with an empty directory, and removes it afterwards.
template <class Work>
void in_scratch_directory(ProcessGroup& group, Work work) {
  std::string mine = fs::temp_directory_path() / "lockstep-lab-XXXXXX";
  if (group.rank() == 0 && ::mkdtemp(mine.data()) == nullptr) {
    fail<EnvironmentError>(
        "cannot make a directory {}: {}; set TMPDIR to one that you may write to", mine,
        std::strerror(errno));
  }
  const fs::path directory = group.exchange(mine).at(0);
  const auto remove = [&] {
    std::error_code ignored;
    if (group.rank() == 0) fs::remove_all(directory, ignored);
  };
  try {
    work(directory);
  } catch (...) {
    remove();  // not left to a destructor: an error may end the program without unwinding
    throw;
  }
  group.barrier();
  remove();
}

Trained trained(RankTraining& training) {
  return {*training.model.network, training.parameters, training.optimizer};
}

/// One that saves correctly.
RankZeroCheckpointer checkpointer_of(RankTraining& training, const fs::path& directory) {
  const SavingOptions options{
      .directory = directory, .resume = "auto", .say = [](const std::string&) {}};
  return RankZeroCheckpointer(trained(training), options, training.comm,
                              training.group.exchanger());
}

// --- All ranks save ------------------------------------------------------------------------------

/// What a reader finds, in a line.
std::string reading(const fs::path& file) {
  try {
    const SafetensorsFile found = load_safetensors(file);
    return fmt::format("a whole file of {} tensors", found.tensors().size());
  } catch (const Error& error) {
    const std::string text = error.what();
    return "refused: " + text.substr(text.find(": ") + 2);  // without the directory's name
  }
}

/// The mistake: every rank opens the same file, and writes header and tensors as it gets to them.
/// The ranks take turns, so that the race ends in the same way each time.
void write_all_at_once(RankTraining& training, const fs::path& path) {
  ProcessGroup& group = training.group;
  const std::vector<StateTensor> state = state_dict(*training.model.network);
  const std::vector<std::byte> bytes =
      serialize_safetensors(file_entries(state), {{"format", "pt"}}, Checksums::crc32);
  uint64_t length = 0;
  std::memcpy(&length, bytes.data(), sizeof length);
  const auto header = std::streamsize(sizeof length + length);
  const char* const text = reinterpret_cast<const char*>(bytes.data());

  std::ofstream file;
  const auto write_header = [&] {
    file.open(path, std::ios::binary | std::ios::trunc);
    file.write(text, header).flush();
  };
  const auto write_tensors = [&] { file.write(text + header, std::ssize(bytes) - header).flush(); };
  if (group.rank() == 0) write_header();
  group.barrier();
  if (group.rank() != 0) write_header();
  group.barrier();
  say(group, fmt::format("while they write: {}", reading(path)));
  group.barrier();
  if (group.rank() != 0) write_tensors();
  group.barrier();
  if (group.rank() == 0) write_tensors();
}

/// The ranks have the same weights, but, without SyncBatchNorm, their own running statistics.
void all_ranks_save(ProcessGroup& group, bool fixed) {
  RankTraining training(group, ModelKind::seed_bn);
  const BatchSplit dealt{BatchSplit::Kind::stride, group.world_size()};
  training.forward_and_backward(training.first_batch(kLabBatch),
                                {dealt.divide(kLabBatch).at(size_t(group.rank()))}, 1);
  in_scratch_directory(group, [&](const fs::path& directory) {
    const TrainingState state{.steps = 1};
    const fs::path path = checkpoint_path(directory, state.steps);
    if (fixed) {
      RankZeroCheckpointer checkpointer = checkpointer_of(training, directory);
      checkpointer.save(state);
      checkpointer.finish();
    } else {
      write_all_at_once(training, path);
      group.barrier();
    }
    say(group, fmt::format("when all are done: {}", reading(path)));
  });
}

// --- No barrier ----------------------------------------------------------------------------------

/// The mistake: each rank finds out by itself where training continues. Rank 0 is still saving when
/// the others look.
TrainingState look_for_oneself(RankTraining& training, const fs::path& directory,
                               const TrainingState& saved, const TrainingState& begin) {
  const auto look = [&] {
    const auto newest = newest_checkpoint(directory, [](const std::string&) {});
    if (!newest) return begin;
    restore(*newest, trained(training));
    return TrainingState::from_json(newest->training, "the checkpoint");
  };
  if (training.group.rank() != 0) {
    const TrainingState found = look();
    training.group.barrier();
    return found;
  }
  training.group.barrier();
  save_checkpoint(directory, trained(training), saved);
  return look();
}

void no_barrier(ProcessGroup& group, bool fixed) {
  RankTraining training(group);
  const TrainingState begin{.world_size = group.world_size()};
  TrainingState saved = begin;
  saved.steps = 100;
  in_scratch_directory(group, [&](const fs::path& directory) {
    RankZeroCheckpointer checkpointer = checkpointer_of(training, directory);
    if (fixed) checkpointer.save(saved);
    const TrainingState found =
        fixed ? checkpointer.resume(begin) : look_for_oneself(training, directory, saved, begin);
    const std::vector<std::string> lines =
        group.exchange(fmt::format("rank {} goes on from step {}", group.rank(), found.steps));
    for (const std::string& line : lines) say(group, line);
  });
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  using namespace lockstep;
  return run_rank_labs(argc, argv,
                       {{"plain-batch-norm", plain_batch_norm},
                        {"averaged-variances", averaged_variances},
                        {"sum-of-squares", sum_of_squares},
                        {"all-ranks-save", all_ranks_save},
                        {"no-barrier", no_barrier}});
}
