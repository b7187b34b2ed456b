function slurm_job_submit(job_desc, part_list, submit_uid)
   if job_desc.partition == "gpuq" and (job_desc.account == nil or job_desc.account == "") then
      slurm.log_user("gpuq: say your project with --account")
      return 2045
   end
   return slurm.SUCCESS
end
function slurm_job_modify(job_desc, job_rec, part_list, modify_uid)
   return slurm.SUCCESS
end
return slurm.SUCCESS
