#include "tch.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/custom_class.h>

#include <string>
#include <utility>

#include "fst/rust/tch/lib.rs.h"

namespace fst::tch {

namespace {

c10::IValue to_ivalue(const Value& value) {
  switch (value.kind) {
    case Kind::None:
      return {};
    case Kind::Text:
      return std::string(value.texts.front());
    case Kind::Device:
      return c10::Device(std::string(value.texts.front()));
    case Kind::Number:
      return value.numbers.front();
    case Kind::Texts: {
      c10::List<std::string> texts;
      for (const auto& text : value.texts) {
        texts.push_back(std::string(text));
      }
      return texts;
    }
    case Kind::Numbers:
      return std::vector<int64_t>(value.numbers.begin(), value.numbers.end());
    case Kind::Tensors: {
      c10::List<at::Tensor> tensors;
      for (const auto& handle : value.tensors) {
        tensors.push_back(*handle.tensor);
      }
      return tensors;
    }
    case Kind::Dict: {
      c10::Dict<std::string, std::string> dict;
      for (size_t index = 0; index + 1 < value.texts.size(); index += 2) {
        dict.insert(std::string(value.texts[index]), std::string(value.texts[index + 1]));
      }
      return dict;
    }
    default:
      TORCH_CHECK(false, "no such kind of a value");
  }
}

torch::jit::Stack to_stack(rust::Slice<const Value> arguments) {
  torch::jit::Stack stack;
  for (const auto& argument : arguments) {
    stack.push_back(to_ivalue(argument));
  }
  return stack;
}

void append(Value& value, const c10::IValue& item) {
  if (item.isTensor()) {
    value.tensors.push_back(Handle{std::make_unique<at::Tensor>(item.toTensor())});
  } else if (item.isString()) {
    value.texts.push_back(rust::String(item.toStringRef()));
  } else if (item.isInt()) {
    value.numbers.push_back(item.toInt());
  } else if (item.isTensorList()) {
    for (const at::Tensor& tensor : item.toTensorVector()) {
      append(value, tensor);
    }
  } else if (item.isTuple()) {
    for (const auto& element : item.toTupleRef().elements()) {
      append(value, element);
    }
  } else if (item.isGenericDict()) {
    for (const auto& entry : item.toGenericDict()) {
      append(value, entry.key());
      append(value, entry.value());
    }
  }
}

Value from_ivalue(const c10::IValue& item) {
  Value value{Kind::None, {}, {}, {}};
  append(value, item);
  return value;
}

torch::jit::Stack call(rust::Str name, rust::Slice<const Value> arguments) {
  auto stack = to_stack(arguments);
  const auto operation = c10::Dispatcher::singleton().findSchemaOrThrow(("fst::" + std::string(name)).c_str(), "");
  operation.callBoxed(stack);
  return stack;
}

}  // namespace

Value call_operator(rust::Str name, rust::Slice<const Value> arguments) {
  const auto results = call(name, arguments);
  return from_ivalue(results.empty() ? c10::IValue() : results.back());
}

std::unique_ptr<Object> object_of_operator(rust::Str name, rust::Slice<const Value> arguments) {
  return std::make_unique<Object>(call(name, arguments).back().toObject());
}

std::unique_ptr<Object> new_object(rust::Str name, rust::Slice<const Value> arguments) {
  const auto type = torch::getCustomClass("__torch__.torch.classes.fst." + std::string(name));
  auto object = c10::ivalue::Object::create(type, 1);
  auto stack = to_stack(arguments);
  stack.insert(stack.begin(), object);
  type->getMethod("__init__")(std::move(stack));
  return std::make_unique<Object>(std::move(object));
}

Value call_method(const Object& object, rust::Str name) {
  return from_ivalue(object->type()->getMethod(std::string(name))({object}));
}

std::string text_of(const c10::Error& error) {
  const std::string text = error.what_without_backtrace();
  const bool is_out_of_memory = dynamic_cast<const c10::OutOfMemoryError*>(&error) != nullptr;
  return is_out_of_memory ? std::string(out_of_memory(rust::String::lossy(text))) : text;
}

}  // namespace fst::tch
