#pragma once
// Slurm's short forms of lists.

#include <string>
#include <string_view>

namespace lockstep {

/// The first host of a list as Slurm writes it: "node007" of "node[007-009,12],login".
std::string first_host(std::string_view list);

/// The number of tasks on node `node`, counted from 0, of a list as Slurm writes it: 2 for nodes 0
/// to 2 of "2(x3),1", 1 for node 3. `name` is the variable that holds the list. Throws BadInput for
/// a list that has no such node, or is none.
int tasks_on_node(std::string_view list, int node, const std::string& name);

}  // namespace lockstep
