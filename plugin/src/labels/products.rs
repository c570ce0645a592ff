//! The GPUs by product. On a node of several products one leads: labels that can name one product only always name that one.
//! In gpu-feature-discovery chance decides at each run.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use gantry_topology::Gpu;

use crate::inventory::Inventory;

/// GPUs of one product, by index.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Product<'a> {
    /// Name as NVML prints it; `None` for GPUs without a known name.
    pub(super) model: Option<&'a str>,
    /// GPUs with MIG off.
    pub(super) whole: Vec<&'a Gpu>,
    /// GPUs with MIG on, also those with no instance yet.
    pub(super) cut: Vec<&'a Gpu>,
}

impl<'a> Product<'a> {
    /// The number of its GPUs.
    pub(super) fn count(&self) -> usize {
        self.whole.len() + self.cut.len()
    }

    /// The GPU with the values of all: the first whole one, otherwise the first.
    pub(super) fn example(&self) -> Option<&'a Gpu> {
        self.whole.first().or(self.cut.first()).copied()
    }

    fn lowest(&self) -> u8 {
        let gpus = self.whole.iter().chain(&self.cut);
        gpus.map(|gpu| gpu.index).min().unwrap_or(u8::MAX)
    }
}

/// Every product among these GPUs, the leading one first: products with a name, then with a whole GPU, then by most GPUs, then by
/// lowest index.
pub(super) fn all<'a>(gpus: &[&'a Gpu]) -> Vec<Product<'a>> {
    let mut products: Vec<Product<'a>> = Vec::new();
    for gpu in gpus.iter().copied() {
        let model = gpu.model.as_deref();
        let known = products.iter().position(|product| product.model == model);
        let position = known.unwrap_or_else(|| {
            products.push(Product { model, whole: Vec::new(), cut: Vec::new() });
            products.len() - 1
        });
        match is_cut(gpu) {
            true => products[position].cut.push(gpu),
            false => products[position].whole.push(gpu),
        }
    }
    in_order(products)
}

/// `products` with only those GPUs that have an offered device.
pub(super) fn offered<'a>(products: &[Product<'a>], inventory: &Inventory) -> Vec<Product<'a>> {
    let gpus: BTreeSet<u8> = inventory.devices.iter().map(|device| device.gpu).collect();
    let of = |all: &[&'a Gpu]| -> Vec<&'a Gpu> {
        let served = all.iter().filter(|gpu| gpus.contains(&gpu.index));
        served.copied().collect()
    };
    let rest = products.iter().map(|product| Product {
        model: product.model,
        whole: of(&product.whole),
        cut: of(&product.cut),
    });
    in_order(rest.filter(|product| product.count() > 0).collect())
}

fn in_order(mut products: Vec<Product<'_>>) -> Vec<Product<'_>> {
    products.sort_by_key(|product| {
        (product.model.is_none(), product.whole.is_empty(), Reverse(product.count()), product.lowest())
    });
    products
}

/// Whether MIG is on.
pub(super) fn is_cut(gpu: &Gpu) -> bool {
    gpu.mig.as_ref().is_some_and(|mig| mig.enabled)
}
