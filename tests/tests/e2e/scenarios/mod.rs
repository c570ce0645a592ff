//! The scenarios. Each sets up a state, causes events and checks the result.

mod bypass;
mod certificates;
mod churn;
mod connections;
mod device_lists;
mod failures;
mod full_disks;
mod gangs;
mod gangs_absent;
mod gangs_affinity;
mod gangs_commit;
mod gangs_deadlock;
mod gangs_deletion;
mod gangs_failures;
mod gangs_input;
mod gangs_integrations;
mod gangs_levels;
mod gangs_native;
mod gangs_nodes;
mod gangs_owned;
mod gangs_phases;
mod gangs_preempt;
mod gangs_repair;
mod gangs_restart;
mod gangs_schedulers;
mod gangs_spares;
mod gangs_status;
mod gangs_truth;
mod guard;
mod kueue;
mod lost_gpus;
mod mig_layouts;
mod missing_rights;
mod modes;
mod monitoring;
mod node_changes;
mod node_config;
mod operate;
mod page;
mod placement;
mod replicas;
mod requests;
mod rights;
mod samples;
mod scheduler_settings;
mod shapes;
mod slow_members;
mod smoke;
mod stock;
mod storm;
mod topology_manager;
mod upgrades;

use std::pin::Pin;

use anyhow::Result;
use gantry_e2e::Feature;

use crate::bed::Bed;

type Outcome<'a> = Pin<Box<dyn Future<Output = Result<()>> + 'a>>;

/// One scenario.
pub(crate) struct Scenario {
    /// Its name in the output of the test runner.
    pub(crate) name: &'static str,
    /// Whether it runs on every version of Kubernetes that Gantry supports, not only on the one of CI.
    pub(crate) is_core: bool,
    /// Whether it takes too long for every commit: it runs nightly, and if a filter names it.
    pub(crate) is_long: bool,
    /// What it needs of Kubernetes that not every version has.
    pub(crate) needs: Option<Feature>,
    /// Whether it needs a Chromium.
    pub(crate) needs_browser: bool,
    story: fn(&Bed) -> Outcome<'_>,
}

impl Scenario {
    /// Has it run on every version of Kubernetes.
    fn core(self) -> Self {
        Self { is_core: true, ..self }
    }

    /// Leaves it to the nightly run.
    fn long(self) -> Self {
        Self { is_long: true, ..self }
    }

    /// Leaves it out where Kubernetes lacks the feature.
    fn needs(self, feature: Feature) -> Self {
        Self { needs: Some(feature), ..self }
    }

    /// Leaves it out where there is no Chromium.
    fn in_browser(self) -> Self {
        Self { needs_browser: true, ..self }
    }

    /// Runs it.
    pub(crate) async fn run(&self, bed: &Bed) -> Result<()> {
        (self.story)(bed).await
    }
}

/// Names a scenario after its module and function, in 60 characters at most. Calls after the name say more about it.
macro_rules! scenarios {
    ($($module:ident :: $name:ident $(. $method:ident ($($argument:expr)?))*),* $(,)?) => {
        vec![$({
            const NAME: &str = concat!(stringify!($module), "::", stringify!($name));
            const { assert!(NAME.len() <= 60, "the name of the scenario is too long") };
            Scenario {
                name: NAME,
                is_core: false,
                is_long: false,
                needs: None,
                needs_browser: false,
                story: |bed| Box::pin($module::$name(bed)),
            }
                $(.$method($($argument)?))*
        }),*]
    };
}

/// All scenarios in the order of execution: first those that need none of Gantry's daemons. Those marked `core` are about
/// what Gantry uses of Kubernetes: its APIs, admission policies, kube-scheduler and kubelet.
pub(crate) fn all() -> Vec<Scenario> {
    scenarios![
        smoke::plain_pod_runs_on_each_node.core(),
        smoke::container_logs_and_kubelet_api_are_readable.core(),
        smoke::simulated_gpus_are_on_their_nodes.core(),
        smoke::kubelet_restart_keeps_pods.core(),
        smoke::api_server_kill_loses_nothing,
        stock::pod_without_gpus_runs_while_extender_is_down.core(),
        guard::only_extender_may_write_grants.core(),
        guard::plugin_may_change_only_its_own_fields.core(),
        rights::plugin_writes_only_its_own_gpu_node.core(),
        rights::daemons_write_only_their_own_events.core(),
        rights::plugin_writes_only_its_own_node_feature.core(),
        rights::extender_writes_only_what_it_needs_of_pods.core(),
        rights::resets_are_narrowed_to_the_template.core(),
        rights::optional_manifests_are_accepted.core(),
        placement::requests_get_best_node_and_set.core(),
        placement::bound_pod_shows_why_it_is_there.core(),
        placement::unschedulable_request_reports_gpu_reason.core(),
        placement::device_nodes_reach_container_by_spec_and_cdi.core(),
        shapes::containers_share_the_grant_of_their_pod.core(),
        // Before scenarios that leave faults of GPUs behind, for which alerts fire.
        monitoring::prometheus_records_and_alerts,
        bypass::pod_with_node_name_avoids_reserved_devices.core(),
        churn::many_pods_start_and_end,
        failures::force_deleted_pod_keeps_devices_until_exit.core().needs(Feature::DropsEndedPods),
        failures::plugin_killed_during_admission,
        failures::kubelet_restarted_under_running_pods.core().needs(Feature::DropsEndedPods),
        failures::extender_killed_repeatedly,
        failures::unreadable_pod_resources_stop_no_pod,
        full_disks::full_disk_delays_cdi_specification,
        full_disks::full_disk_delays_registration_and_fails_pods,
        failures::api_server_unavailable_for_a_while.long(),
        failures::restored_etcd_takes_bindings_back.long(),
        storm::random_faults_leave_nothing_wrong.long(),
        modes::replicas_of_one_gpu_serve_several_pods.core(),
        modes::mig_mixed_profiles_are_separate_resources.core(),
        modes::mig_single_slices_are_gpus,
        modes::compute_slices_are_separate_resources,
        modes::changed_config_applies_and_bad_config_does_not.core(),
        topology_manager::refused_pod_aligns_node_of_unknown_policy,
        topology_manager::granted_pods_are_never_refused,
        topology_manager::gpus_are_granted_near_exclusive_cpus,
        topology_manager::gpus_are_granted_near_memory,
        node_config::node_label_selects_config_from_config_map.core(),
        node_config::labels_are_written_to_node_or_node_feature.core(),
        rights::plugin_reads_pods_with_kubelets_credential.core().needs(Feature::OwnPodsOnly),
        rights::daemons_report_missing_policies.core(),
        missing_rights::gpu_pod_waits_for_extender_and_its_rights,
        missing_rights::plugin_serves_without_each_right,
        missing_rights::plugin_starts_without_each_right.long(),
        missing_rights::extender_uses_optional_right_when_granted.long(),
        node_changes::changed_mig_layout_changes_resources,
        node_changes::xid_is_reported_everywhere_until_lifted.core(),
        node_changes::quarantine_survives_plugin_without_api_server,
        mig_layouts::layout_follows_label_and_spares_held_gpus,
        mig_layouts::shipped_layout_drains_and_rolls_back.long(),
        operate::cordoned_gpu_is_withheld_until_uncordoned.core(),
        operate::drain_evicts_holders_and_their_gangs_only,
        lost_gpus::drain_evicts_holders_of_its_gpu_only,
        operate::node_in_driver_upgrade_gets_no_pods,
        operate::remediation_rule_acts_once_within_limits,
        operate::rule_resets_a_gpu_by_a_job.long(),
        operate::rules_mark_the_node_while_faults_last,
        slow_members::slow_member_of_gang_is_named.long(),
        page::browser_follows_gangs_and_pods.in_browser(),
        device_lists::devices_reach_container_by_every_strategy.core(),
        device_lists::kubelet_uses_uuids_and_containers_indices,
        device_lists::node_serves_whole_and_shared_gpus,
        device_lists::mig_slices_can_be_shared,
        device_lists::companion_devices_are_added_on_request,
        stock::pod_without_gpus_is_never_changed.core(),
        gangs::second_large_gang_waits_for_the_first.core(),
        gangs::gang_larger_than_cluster_reports_numbers,
        gangs::single_pods_do_not_starve_a_gang.core(),
        gangs::gang_waits_for_missing_members.core(),
        gangs::gated_gang_is_released_when_complete.core().needs(Feature::MutatingAdmissionPolicies),
        gangs::missing_member_does_not_hold_reservations,
        gangs_status::gang_progress_is_reported_everywhere.core(),
        gangs_truth::role_that_never_fits_is_named,
        gangs_truth::min_domains_is_named_as_the_constraint,
        gangs_truth::unregistered_plugins_are_the_first_cause,
        gangs_repair::member_lost_in_queue_or_at_barrier.long(),
        gangs_repair::bound_gang_holds_or_releases_reservation.core(),
        gangs_repair::bound_gang_restarts_as_a_whole.core(),
        gangs_repair::gang_deleted_with_its_namespace,
        gangs_deletion::member_deleted_in_backoff_or_invalid.long(),
        gangs_deletion::member_deleted_while_preempting_or_degraded.long(),
        gangs_deletion::member_deleted_while_committing.long(),
        gangs_commit::kubelet_extender_and_node_fail_before_commit.long(),
        gangs_deletion::member_deleted_and_binder_killed.long(),
        gangs_preempt::gang_preempts_whole_gang_within_budgets.core(),
        gangs_preempt::single_pod_preempts_without_breaking_gangs.core(),
        gangs_preempt::surplus_member_goes_rather_than_its_gang,
        gangs_preempt::victim_that_never_ends_is_given_up.long(),
        gangs_spares::replacement_takes_lent_spare,
        gangs_failures::extender_and_scheduler_killed_in_all_phases.long(),
        gangs_failures::kubelets_killed_in_all_phases.long(),
        gangs_phases::short_phases_survive_kills.long(),
        gangs_phases::short_phases_survive_extender_update.long(),
        gangs_failures::extender_killed_while_binding.long(),
        gangs_failures::node_lost_between_plan_and_decision,
        gangs_failures::kubelet_down_while_gang_binds_to_its_node,
        gangs_failures::node_deleted_under_bound_gang,
        gangs_absent::reservations_leave_node_of_stopped_plugin.long(),
        gangs_absent::kubelet_away_moves_reservations_only.long(),
        gangs_absent::node_cut_off_loses_its_member.long(),
        gangs_nodes::node_lost_while_binding,
        gangs_nodes::node_lost_while_preempting_or_degraded.long(),
        gangs_failures::two_extenders_fail_over,
        gangs_input::invalid_settings_are_reported_on_gang_and_pods.core(),
        gangs_input::gang_spec_takes_precedence_until_bound.core(),
        gangs_levels::gang_follows_level_slices_and_ranks,
        requests::members_share_rails_and_get_their_topology,
        requests::request_without_devices_is_reported.core(),
        gangs_affinity::members_with_affinity_follow_siblings,
        gangs_native::kubernetes_groups_are_gangs.core().needs(Feature::NativeGroups),
        gangs_native::pod_groups_are_gangs_with_feature_gate.core().needs(Feature::PodGroups),
        gangs_native::job_with_spec_scheduling_is_a_gang.needs(Feature::JobScheduling),
        gangs_native::only_gantry_preempts_for_a_pod_group.needs(Feature::BetaPodGroups),
        gangs_native::pod_group_members_are_evicted_singly.needs(Feature::BetaPodGroups),
        gangs_native::pod_group_is_evicted_whole_on_request.needs(Feature::BetaPodGroups),
        gangs_native::composite_pod_group_is_one_gang.needs(Feature::CompositePodGroups).long(),
        gangs_native::composite_pod_group_is_one_gang_with_gates.needs(Feature::CompositePodGroups),
        // The API server has the gate of constraints where it has that of trees.
        gangs_native::pod_group_with_many_placements_is_bound.needs(Feature::CompositePodGroups),
        gangs_deadlock::deadlocked_gang_yields_to_the_other.long(),
        gangs_schedulers::foreign_gang_reserves_on_first_request.long(),
        scheduler_settings::ignorable_extender_is_left_out.long(),
        scheduler_settings::unmanaged_resource_gets_no_grant.long(),
        certificates::expired_certificate_holds_gpu_pods_back,
        certificates::rotated_token_and_authority_are_read.long(),
        connections::silent_watches_are_opened_again.long(),
        replicas::unelected_extenders_grant_devices_twice.long(),
        gangs_schedulers::basic_group_pods_are_scheduled_singly.needs(Feature::BetaPodGroups),
        gangs_integrations::marks_of_other_schedulers_make_gangs,
        gangs_integrations::parallel_stateful_set_is_a_gang.core(),
        gangs_owned::pods_of_other_controllers_are_gangs,
        gangs_integrations::unmodified_controllers_make_gangs,
        gangs_restart::restarted_job_set_keeps_its_devices,
        gangs_restart::updated_leader_worker_set_keeps_its_devices,
        upgrades::guard_of_other_namespace_refuses_grants.long(),
        upgrades::older_definition_of_gangs_holds_gangs_back.long(),
        upgrades::missing_definition_of_gpu_nodes_is_awaited.long(),
        kueue::quota_admits_and_gantry_places,
        samples::documented_objects_are_accepted.core(),
    ]
}
