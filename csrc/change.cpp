#include "change.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include "cast.h"
#include "load.h"

namespace fst {

void write_changes(const std::vector<Change>& changes) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  for (const auto& [target, positions, values] : changes) {
    if (positions.defined()) {
      target.view({-1}).index_put_({positions.to(target.device(), at::kLong)}, values.to(target.device()));
    } else {
      copy_elements(target, values);
    }
    mark_changed({target});
  }
}

}  // namespace fst
