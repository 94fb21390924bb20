//! Strided arrangements of elements, and the index regions that they cover.

use crate::checkpoint::region::IndexRange;

/// Arrangement of the elements of a tensor in memory, or of a view in the tensor that it shows. All numbers count
/// elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Position of the first element.
    pub offset: u64,
    /// Sizes of the dimensions.
    pub sizes: Vec<u64>,
    /// Distance between neighbours in each dimension.
    pub strides: Vec<u64>,
}

/// Memory that pieces and copies use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    /// Requested output with this index.
    Output(usize),
    /// Tensor in the memory of the caller with this index.
    Held(usize),
    /// Temporary tensor with this index.
    Temporary(usize),
}

/// Elements of a tensor in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Elements {
    /// The tensor.
    pub memory: Memory,
    /// Arrangement of the elements from the first element of the tensor.
    pub layout: Layout,
}

/// Returns the number of elements of a shape.
pub fn numel(shape: &[u64]) -> u64 {
    if shape.contains(&0) { 0 } else { shape.iter().fold(1, |product, &size| product.saturating_mul(size)) }
}

impl Layout {
    /// Returns the arrangement of a contiguous tensor.
    pub fn contiguous(shape: &[u64]) -> Layout {
        let mut stride = 1_u64;
        let mut strides: Vec<u64> = Vec::with_capacity(shape.len());
        for &size in shape.iter().rev() {
            strides.push(stride);
            stride = stride.saturating_mul(size.max(1));
        }
        strides.reverse();
        Layout { offset: 0, sizes: shape.to_vec(), strides }
    }

    /// Returns the number of elements.
    pub fn numel(&self) -> u64 {
        numel(&self.sizes)
    }

    /// Returns the position behind the last element.
    pub fn end(&self) -> u64 {
        if self.numel() == 0 {
            return self.offset;
        }
        let add = |end: u64, (size, stride): (u64, u64)| end.saturating_add((size - 1).saturating_mul(stride));
        self.dims().fold(self.offset, add).saturating_add(1)
    }

    /// Returns whether the elements follow each other in memory.
    pub fn is_contiguous(&self) -> bool {
        let mut expected = 1_u64;
        self.numel() == 0
            || self.dims().rev().all(|(size, stride)| {
                let follows = size == 1 || stride == expected;
                expected = expected.saturating_mul(size);
                follows
            })
    }

    /// Iterates over sizes and strides.
    fn dims(&self) -> impl DoubleEndedIterator<Item = (u64, u64)> + '_ {
        self.sizes.iter().copied().zip(self.strides.iter().copied())
    }

    /// Returns the arrangement with its dimensions in another order, which names each of them once.
    pub fn permute(&self, order: &[usize]) -> Layout {
        let pick = |values: &[u64]| order.iter().filter_map(|&dim| values.get(dim).copied()).collect();
        Layout { offset: self.offset, sizes: pick(&self.sizes), strides: pick(&self.strides) }
    }

    /// Returns the dimensions from the largest stride to the smallest.
    pub fn stride_order(&self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.sizes.len()).collect();
        order.sort_by_key(|&dim| std::cmp::Reverse(self.strides.get(dim).copied()));
        order
    }

    /// Returns the elements with these indices of each dimension, which lie inside it.
    pub fn index(&self, ranges: &[IndexRange]) -> Layout {
        let mut offset = self.offset;
        for (range, stride) in ranges.iter().zip(&self.strides) {
            offset = offset.saturating_add(range.start.saturating_mul(*stride));
        }
        let strides = ranges.iter().zip(&self.strides).map(|(range, stride)| range.step.saturating_mul(*stride));
        Layout { offset, sizes: ranges.iter().map(|range| range.length).collect(), strides: strides.collect() }
    }

    /// Returns the elements with these indices of one dimension.
    pub fn index_dim(&self, dim: usize, range: IndexRange) -> Layout {
        let mut ranges: Vec<IndexRange> = self.sizes.iter().copied().map(IndexRange::whole).collect();
        if let Some(own) = ranges.get_mut(dim) {
            *own = range;
        }
        self.index(&ranges)
    }

    /// Returns one index of a dimension, without the dimension.
    pub fn select(&self, dim: usize, index: u64) -> Layout {
        let mut selected = self.index_dim(dim, IndexRange { start: index, length: 1, step: 1 });
        if dim < selected.sizes.len() {
            selected.sizes.remove(dim);
            selected.strides.remove(dim);
        }
        selected
    }

    /// Returns the arrangement with one more dimension of size 1.
    pub fn unsqueeze(&self, dim: usize) -> Layout {
        let mut layout = self.clone();
        let dim = dim.min(layout.sizes.len());
        layout.sizes.insert(dim, 1);
        layout.strides.insert(dim, 1);
        layout
    }

    /// Returns the elements in another shape with the same number of elements, or `None` if that takes a copy.
    pub fn view(&self, shape: &[u64]) -> Option<Layout> {
        if self.numel() == 0 {
            return Some(Layout { offset: self.offset, ..Layout::contiguous(shape) });
        }
        // Dimensions that are contiguous with each other are one, from the innermost outwards.
        let mut chunks: Vec<(u64, u64)> = Vec::new();
        for (size, stride) in self.dims().rev().filter(|&(size, _)| size != 1) {
            match chunks.last_mut() {
                Some((count, inner)) if count.saturating_mul(*inner) == stride => *count = count.saturating_mul(size),
                _ => chunks.push((size, stride)),
            }
        }
        let mut chunks = chunks.into_iter();
        let mut strides = Vec::with_capacity(shape.len());
        let (mut left, mut stride) = (1_u64, 1_u64);
        for &size in shape.iter().rev() {
            if size != 1 && left == 1 {
                (left, stride) = chunks.next()?;
            }
            if left % size != 0 {
                return None;
            }
            strides.push(stride);
            left /= size;
            stride = stride.saturating_mul(size);
        }
        strides.reverse();
        (left == 1 && chunks.next().is_none()).then(|| Layout { offset: self.offset, sizes: shape.to_vec(), strides })
    }

    /// Returns the index region of a contiguous tensor that the view covers, with its elements in the order of the
    /// view's, or `None` if the view is not a region. The view has elements, its strides do not increase from dimension
    /// to dimension, and it lies inside the tensor.
    pub fn region(&self, shape: &[u64]) -> Option<Vec<IndexRange>> {
        // Count and stride from the outermost dimension inwards. Dimensions that are contiguous with each other are one.
        let mut dims: Vec<(u64, u64)> = Vec::new();
        for (size, stride) in self.dims() {
            match dims.last_mut() {
                Some((count, outer)) if *outer == size.saturating_mul(stride) => {
                    *count = count.saturating_mul(size);
                    *outer = stride;
                }
                _ if size > 1 => dims.push((size, stride)),
                _ => {}
            }
        }
        let mut inner_elements = 1_u64;
        let mut ranges = Vec::with_capacity(shape.len());
        for &size in shape.iter().rev() {
            let start = (self.offset / inner_elements).checked_rem(size)?;
            let dim_elements = inner_elements.saturating_mul(size);
            let mut range = IndexRange { start, length: 1, step: 1 };
            if let Some((count, stride)) = dims.pop_if(|(_, stride)| *stride < dim_elements) {
                let step = stride / inner_elements;
                if step == 0 || stride % inner_elements != 0 {
                    return None;
                }
                let length = if start.saturating_add((count - 1).saturating_mul(step)) < size {
                    count
                } else {
                    // The view has all indices of this dimension, and continues in the next.
                    let inner = size / step;
                    if size % step != 0 || start >= step || count % inner != 0 {
                        return None;
                    }
                    dims.push((count / inner, dim_elements));
                    inner
                };
                range = IndexRange { length, step, ..range };
            }
            ranges.push(range);
            inner_elements = dim_elements;
        }
        ranges.reverse();
        dims.is_empty().then_some(ranges)
    }
}
