//! Layouts of tensors over meshes.

use fst::ranks::mesh::{Mesh, MeshLayout, Placement};
use proptest::collection::vec;
use proptest::prelude::*;

fn layout() -> impl Strategy<Value = MeshLayout> {
    let placement = prop_oneof![
        Just(Placement::Replicated),
        (0_usize..2, 1_u64..4).prop_map(|(dim, split_factor)| Placement::Sharded { dim, split_factor }),
    ];
    vec((1_usize..4, placement), 1..4).prop_flat_map(|dims| {
        let (shape, placements): (Vec<usize>, Vec<Placement>) = dims.into_iter().unzip();
        let ranks: Vec<usize> = (0..shape.iter().product()).collect();
        Just(ranks).prop_shuffle().prop_map(move |ranks| {
            MeshLayout::new(Mesh::new(shape.clone(), ranks).unwrap(), placements.clone()).unwrap()
        })
    })
}

proptest! {
    /// Cells have every index once, and are those indices that a rank with their coordinates has.
    #[test]
    fn cells_divide_each_dimension(layout in layout(), shape in [0_u64..20, 0_u64..20]) {
        for (dim, &size) in shape.iter().enumerate() {
            let cells = layout.cells(dim, size);
            let covered: Vec<u64> = cells.iter().flat_map(|cell| cell.indices.clone()).collect();
            prop_assert_eq!(covered, (0..size).collect::<Vec<_>>());
            let mesh_dims: Vec<usize> = layout.mesh_dims(dim).collect();
            for &rank in layout.mesh().ranks() {
                let coordinate = layout.mesh().coordinate(rank).unwrap();
                let places = coordinate.iter().zip(layout.mesh().shape());
                let index = places.fold(0, |index, (&place, &size)| index * size + place);
                prop_assert_eq!(layout.mesh().ranks()[index], rank);
                let own: Vec<usize> = mesh_dims.iter().map(|&mesh_dim| coordinate[mesh_dim]).collect();
                let indices: Vec<u64> = layout.indices(&shape, &coordinate)[dim].iter().cloned().flatten().collect();
                let in_cells = cells.iter().filter(|cell| cell.coordinates == own);
                prop_assert_eq!(indices, in_cells.flat_map(|cell| cell.indices.clone()).collect::<Vec<_>>());
            }
        }
    }
}

#[test]
fn layouts_decode() {
    let layout = MeshLayout::new(
        Mesh::new(vec![2, 2], vec![3, 1, 0, 2]).unwrap(),
        vec![Placement::Replicated, Placement::Sharded { dim: 1, split_factor: 2 }],
    );
    let numbers = [2, 2, 2, 3, 1, 0, 2, -1, 0, 1, 2, 77];
    assert_eq!(MeshLayout::decode(&numbers).unwrap(), (layout.unwrap(), 11));
    for length in 0..11 {
        MeshLayout::decode(&numbers[..length]).unwrap_err();
    }
    MeshLayout::decode(&[1, 2, 3, 3, -1, 0]).unwrap_err();
    MeshLayout::decode(&[1, 1 << 40, 3]).unwrap_err();
}
