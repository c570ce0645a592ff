//! Shapes of members: what they ask for and need, each kept once and numbered.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use gantry_api::ResourceName;
use gantry_gang::Needs;
use gantry_gang::needs::Toleration;
use gantry_gang::protocol::ShapeId;
use gantry_planner::input::Shape;
use gantry_planner::request::Request;

use crate::index::occupancy::GangReservation;

/// Most tolerations that are collected.
const MOST_TOLERATIONS: usize = 64;
/// Shapes kept before unused ones are removed.
const MANY: usize = 1024;

/// The shapes in use, and some unused ones.
#[derive(Debug, Default)]
pub(super) struct Shapes {
    numbers: HashMap<Shape, ShapeId>,
    /// By number, as asked for.
    asked: Vec<Shape>,
    /// By number, restricted to managed resources: the input of plans.
    managed: Vec<Shape>,
    by: Arc<BTreeSet<ResourceName>>,
    /// Numbers for reuse.
    unused: Vec<ShapeId>,
    /// The number of shapes after unused ones were last removed.
    swept: usize,
}

impl Shapes {
    /// What members of gangs tolerate, each once; [`MOST_TOLERATIONS`] at most.
    pub(super) fn tolerations(&self) -> Vec<Toleration> {
        let mut all = Vec::new();
        for toleration in self.list().iter().flat_map(|shape| &shape.needs.tolerations) {
            if all.len() < MOST_TOLERATIONS && !all.contains(toleration) {
                all.push(toleration.clone());
            }
        }
        all
    }

    /// The number of a shape, a new one if it is new.
    pub(super) fn of(&mut self, request: &Arc<Request>, needs: &Arc<Needs>) -> ShapeId {
        let shape = Shape { request: Arc::clone(request), needs: Arc::clone(needs) };
        if let Some(known) = self.numbers.get(&shape) {
            return *known;
        }
        let managed = Shape { request: request.of(&self.by), needs: Arc::clone(needs) };
        let number = match self.unused.pop() {
            Some(number) => {
                self.asked[number.0 as usize] = shape.clone();
                self.managed[number.0 as usize] = managed;
                number
            }
            None => {
                let number = ShapeId(u32::try_from(self.asked.len()).unwrap_or(u32::MAX));
                self.asked.push(shape.clone());
                self.managed.push(managed);
                number
            }
        };
        self.numbers.insert(shape, number);
        number
    }

    /// The shapes by number, with what is managed of their requests.
    pub(super) fn list(&self) -> &[Shape] {
        &self.managed
    }

    /// The shape of a number, restricted to managed resources.
    pub(super) fn get(&self, shape: ShapeId) -> Option<&Shape> {
        self.managed.get(shape.0 as usize)
    }

    /// The request of the members of a reservation, if known.
    pub(super) fn request_of(&self, reservation: &GangReservation) -> Option<&Request> {
        Some(&self.get(reservation.shape?)?.request)
    }

    /// Other resources are managed now. False if they are the same.
    pub(super) fn manage(&mut self, managed: Arc<BTreeSet<ResourceName>>) -> bool {
        if self.by == managed {
            return false;
        }
        for (asked, projected) in self.asked.iter().zip(&mut self.managed) {
            projected.request = asked.request.of(&managed);
        }
        self.by = managed;
        true
    }

    /// Whether it is time to remove unused shapes.
    pub(super) fn are_many(&self) -> bool {
        self.asked.len() > MANY.max(2 * self.swept)
    }

    /// Removes the shapes that are not in use.
    pub(super) fn sweep(&mut self, used: &HashSet<ShapeId>) {
        self.numbers.retain(|_, number| used.contains(number));
        self.unused =
            (0u32..).map(ShapeId).take(self.asked.len()).filter(|number| !used.contains(number)).collect();
        self.swept = used.len();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::request;

    #[test]
    fn equal_shapes_share_a_number_and_unused_ones_are_reused() {
        let mut shapes = Shapes::default();
        shapes.manage(Arc::new(BTreeSet::from(["nvidia.com/gpu".into()])));
        let needs = Arc::new(Needs::default());
        let one = shapes.of(&request(1), &needs);
        let two = shapes.of(&request(2), &needs);
        assert_ne!(one, two);
        assert_eq!(shapes.of(&request(1), &needs), one);
        shapes.sweep(&HashSet::from([two]));
        assert_eq!(shapes.of(&request(2), &needs), two);
        assert_eq!(shapes.of(&request(4), &needs), one);
        assert_eq!(shapes.get(one).map(|shape| shape.request.devices("nvidia.com/gpu")), Some(4));
    }

    #[test]
    fn plans_are_made_for_what_is_managed() {
        let mut shapes = Shapes::default();
        let needs = Arc::new(Needs::default());
        let shape = shapes.of(&request(2), &needs);
        assert!(shapes.list()[shape.0 as usize].request.is_empty());
        assert!(shapes.manage(Arc::new(BTreeSet::from(["nvidia.com/gpu".into()]))));
        assert_eq!(shapes.list()[shape.0 as usize].request.devices("nvidia.com/gpu"), 2);
    }
}
