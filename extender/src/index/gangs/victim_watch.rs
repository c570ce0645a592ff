//! Pods that came to their places after gangs were refused, or that disruption budgets protect no more: a gang that may have them stopped
//! is worth another plan. Told with the next tick and not at once: to look for victims costs many plans, pods come all the time, and
//! budgets change with every pod that becomes ready. Decides nothing.

/// Who was refused, and who has come since.
#[derive(Debug, Default)]
pub(super) struct VictimWatch {
    /// How far room had grown when gangs were refused last, and the highest priority among them.
    refused: Option<(u64, i32)>,
    /// The lowest priority of those that have come since the last look.
    came: Option<i32>,
    /// Budgets allow more than at the last look.
    unprotected: bool,
}

impl VictimWatch {
    /// A gang was refused.
    pub(super) fn refused(&mut self, room: u64, priority: i32) {
        self.refused = match self.refused {
            Some((then, highest)) if then == room => Some((room, highest.max(priority))),
            _ => Some((room, priority)),
        };
    }

    /// A pod is on its node.
    pub(super) fn came(&mut self, priority: i32) {
        self.came = Some(self.came.map_or(priority, |lowest| lowest.min(priority)));
    }

    /// Disruption budgets allow more than before.
    pub(super) fn may_go(&mut self) {
        self.unprotected = true;
    }

    /// Whether budgets allow more than at the last look, or somebody has come since who is of lower priority than a gang that was refused.
    pub(super) fn take(&mut self) -> bool {
        let came = self.came.take();
        let unprotected = std::mem::take(&mut self.unprotected);
        unprotected || matches!((came, self.refused), (Some(came), Some((_, refused))) if came < refused)
    }
}
