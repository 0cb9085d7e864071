// A device for tests, named "toy": tensors that live on it cannot be read or mixed with tensors of
// the CPU, as on a GPU, but its memory is that of the host, and its operators are those of the CPU.
// `waits()` counts how often a program waited: for a number, for a tensor copied to the host, or
// for one copied from there, if it did not say that it need not.

#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/extension.h>

namespace {

using at::IntArrayRef;
using at::Tensor;
template <typename T>
using Maybe = std::optional<T>;

constexpr auto TOY = c10::DeviceType::PrivateUse1;
const c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);
int64_t wait_count = 0;

// ---- memory, the one stream, and what autograd asks of a device ---------------------------------

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* data = size ? c10::alloc_cpu(size) : nullptr;
    return {data, data, &c10::free_cpu, c10::Device(TOY, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &c10::free_cpu; }
  void copy_data(void* to, const void* from, size_t size) const override {
    std::memcpy(to, from, size);
  }
} memory;
REGISTER_ALLOCATOR(TOY, &memory);

struct Guard final : c10::impl::NoOpDeviceGuardImpl<TOY> {
  static c10::Stream stream() {
    return c10::Stream(c10::Stream::DEFAULT, c10::Device(TOY, 0));
  }
  c10::Device getDevice() const override { return {TOY, 0}; }
  c10::Device exchangeDevice(c10::Device) const override { return {TOY, 0}; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream(); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag)
      const override {
    *event = &wait_count;  // any address
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    at::native::resize_bytes_cpu(storage.unsafeGetStorageImpl(), size);
  }
} hooks;

// ---- operators that know where memory lies ------------------------------------------------------

// The same memory as a tensor of the CPU.
Tensor on_host(const Tensor& tensor) {
  auto options = tensor.options().device(at::kCPU).requires_grad(false);
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  auto host = at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
  if (tensor.is_conj()) host = host.conj();
  return tensor.is_neg() ? at::_neg_view(host) : host;
}

Tensor empty(
    IntArrayRef size, Maybe<at::ScalarType> dtype, Maybe<at::Layout>, Maybe<at::Device>,
    Maybe<bool>, Maybe<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory, KEYS, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    IntArrayRef size, IntArrayRef stride, Maybe<at::ScalarType> dtype, Maybe<at::Layout>,
    Maybe<at::Device>, Maybe<bool>) {
  return at::detail::empty_strided_generic(
      size, stride, &memory, KEYS, c10::dtype_or_default(dtype));
}

Tensor as_strided(
    const Tensor& self, IntArrayRef size, IntArrayRef stride, Maybe<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

const Tensor& resize_(const Tensor& self, IntArrayRef size, Maybe<at::MemoryFormat>) {
  at::native::resize_impl_cpu_(self.unsafeGetTensorImpl(), size, std::nullopt);
  return self;
}

Tensor copy_from(const Tensor& self, const Tensor& target, bool non_blocking) {
  if (target.is_cpu() || (self.is_cpu() && !non_blocking)) wait_count++;
  auto source = self.is_cpu() ? self : on_host(self);
  (target.is_cpu() ? target : on_host(target)).copy_(source);
  return target;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& target) {
  if (target.sizes() != self.sizes()) target.resize_(self.sizes());
  return copy_from(self, target, false);
}

at::Scalar local_scalar_dense(const Tensor& self) {
  wait_count++;
  return on_host(self).item();
}

Tensor& set_part_of_storage(
    Tensor& self, c10::Storage storage, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  auto* own = self.unsafeGetTensorImpl();
  own->set_storage_keep_dtype(std::move(storage));
  own->set_storage_offset(offset);
  if (stride.empty()) own->set_sizes_contiguous(size);
  else own->set_sizes_and_strides(size, stride);
  return self;
}

Tensor& set_storage(Tensor& self, c10::Storage storage) {
  auto count = static_cast<int64_t>(storage.nbytes() / self.dtype().itemsize());
  return set_part_of_storage(self, std::move(storage), 0, {count}, {1});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_part_of_storage(
      self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

// ---- all other operators ------------------------------------------------------------------------

// Run an operator of the CPU on the same memory; put what it returns on the device.
class OnHost {
 public:
  explicit OnHost(const c10::OperatorHandle& op) : schema_(op.schema()) {
    // an index may live on the CPU
    takes_host_ = schema_.name().find("index") != std::string::npos;
  }

  c10::IValue argument(const c10::IValue& given) {
    if (given.isTensor()) return tensor(given.toTensor());
    if (given.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& each : given.toTensorList()) list.push_back(tensor(each));
      return list;
    }
    if (given.isOptionalTensorList()) {
      c10::List<Maybe<Tensor>> list;
      for (const Maybe<Tensor>& each : given.toOptionalTensorList())
        list.push_back(each ? Maybe<Tensor>(tensor(*each)) : std::nullopt);
      return list;
    }
    if (given.isDevice()) return c10::Device(at::kCPU);
    return given;
  }

  c10::IValue result(const c10::IValue& found, const c10::AliasInfo* alias) {
    if (found.isTensor()) return of_device(found.toTensor(), alias);
    if (!found.isTensorList()) return found;
    c10::List<Tensor> list;
    for (const Tensor& each : found.toTensorList()) list.push_back(of_device(each, alias));
    return list;
  }

 private:
  Tensor tensor(const Tensor& given) {
    if (!given.defined()) return given;
    if (given.is_cpu()) {
      TORCH_CHECK(
          takes_host_ || given.dim() == 0, schema_.name(),
          " expects all tensors on one device, and found one of the CPU, ", given.sizes());
      return given;
    }
    given_.push_back(given);
    hosts_.push_back(on_host(given));
    return hosts_.back();
  }

  Tensor of_device(const Tensor& found, const c10::AliasInfo* alias) {
    if (!found.defined()) return found;
    for (size_t i = 0; i < hosts_.size(); i++) {
      if (!found.is_same(hosts_[i])) continue;
      if (found.sizes() != given_[i].sizes()) {  // an output that grew
        given_[i].resize_(found.sizes());
        on_host(given_[i]).copy_(found);
      }
      given_[i]._set_conj(found.is_conj());  // some results are stored conjugate
      return given_[i];
    }
    TORCH_CHECK(alias == nullptr, schema_.name(), " returns a view, and has no kernel here");
    auto options = found.options().device(c10::Device(TOY, 0));
    auto moved = at::empty_strided(found.sizes(), found.strides(), options);
    on_host(moved).copy_(found.resolve_conj().resolve_neg());
    return moved;
  }

  const c10::FunctionSchema& schema_;
  bool takes_host_;
  std::vector<Tensor> given_, hosts_;
};

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  OnHost host(op);
  for (size_t i = stack->size() - schema.arguments().size(); i < stack->size(); i++)
    (*stack)[i] = host.argument((*stack)[i]);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  const auto count = schema.returns().size();
  for (size_t i = 0; i < count; i++) {
    auto& found = (*stack)[stack->size() - count + i];
    found = host.result(found, schema.returns()[i].alias_info());
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided", &as_strided);
  library.impl("view", &at::native::view);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("unfold", &at::native::unfold);
  library.impl("view_as_real", &at::native::view_as_real);
  library.impl("view_as_complex", &at::native::view_as_complex);
  library.impl("resize_", &resize_);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &local_scalar_dense);
  library.impl("set_.source_Storage_storage_offset", &set_part_of_storage);
  library.impl("set_.source_Storage", &set_storage);
  library.impl("set_.source_Tensor", &set_tensor);
}

// Copies conjugate and negate by themselves.
TORCH_LIBRARY_IMPL(aten, Conjugate, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  at::RegisterPrivateUse1HooksInterface(&hooks);
  module.def("waits", [] { return wait_count; });
}
