#include "common/rendezvous/slurm_lists.h"

#include <algorithm>
#include <cstdint>
#include <limits>

#include "common/core/error.h"
#include "common/core/whole_number.h"
#include "common/sockets/address.h"

namespace lockstep {

std::string first_host(std::string_view list) {
  const size_t end = std::min(list.find_first_of("[,"), list.size());
  const std::string host(list.substr(0, end));
  list.remove_prefix(end);
  if (!list.starts_with('[')) return host;
  const size_t close = std::min(list.find(']'), list.size() - 1);
  const std::string_view number = list.substr(1, list.find_first_of("-,]") - 1);
  return fmt::format("{}{}{}", host, number, first_host(list.substr(close + 1)));
}

int tasks_on_node(std::string_view list, int node, const std::string& name) {
  constexpr int kMost = std::numeric_limits<int>::max();
  const std::string of_list = fmt::format(" in '{}', as in 2(x3),1", list);
  int nodes = 0;
  for (std::string_view rest = list; !rest.empty();) {
    const std::string_view item = rest.substr(0, rest.find(','));
    rest.remove_prefix(std::min(item.size() + 1, rest.size()));
    const bool repeated = item.ends_with(')');
    const size_t end = repeated ? item.find("(x") : item.size();
    require(end != item.npos, "{}={}: '{}' is no number of tasks; expected 2(x3),1 or the like",
            name, list, item);
    const int tasks = parse_whole(item.substr(0, end), name, 1, kMost, of_list);
    const int64_t times =
        repeated ? parse_whole(item.substr(end + 2, item.size() - end - 3), name, 1, kMost, of_list)
                 : 1;
    if (node - nodes < times) return tasks;
    nodes += int(times);
  }
  fail<BadInput>("{}={}: found {} nodes, and this is node {}, counted from 0", name, list, nodes,
                 node);
}

}  // namespace lockstep
